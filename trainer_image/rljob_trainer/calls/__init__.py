"""Clients of the functions that an agent calls: the simulated user, and tools."""
