"""verifiers: reward functions, Rubrics, Tasks, and environments of 0.3 and 0.4."""
