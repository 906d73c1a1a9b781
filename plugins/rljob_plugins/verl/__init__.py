"""verl: reward functions and reward managers."""
