"""What a run keeps: its state, metrics, trajectories, and what it sends to trackers."""
