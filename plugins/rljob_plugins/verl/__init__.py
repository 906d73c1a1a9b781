"""verl: reward functions, reward managers, and former interaction classes."""
