"""verifiers: reward functions, Rubrics, Tasks, and environments of 0.4."""
