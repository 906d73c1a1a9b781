"""Trains on the recorded episodes of a run, for `rljob run --from-trajectories`: without rollouts and rewards."""
