"""`rljob trajectories`: what a job sampled, and how it was scored."""
