"""`rljob run --from-trajectories`: trains on the recorded episodes of a run, and compares the steps with the run's"""
