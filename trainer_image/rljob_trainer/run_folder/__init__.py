"""The run's folder is the head's. Ranks that do not see it write checkpoints through the head."""
