"""`rljob trajectories`."""
