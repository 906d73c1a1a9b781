"""The data of a step: prompts, trajectories, groups and training samples."""
