"""What a run stores: its state, metrics and trajectories; and what it sends to trackers."""
