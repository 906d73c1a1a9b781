"""Drawn faults of a real job on this machine's cluster: how fast each is found, and what it costs."""
