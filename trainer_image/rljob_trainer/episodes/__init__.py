"""The nouns of a step: prompts, trajectories, groups, training samples, and the progress of a collection."""
