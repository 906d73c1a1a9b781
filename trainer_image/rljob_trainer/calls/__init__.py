"""Clients of what an agent calls: the simulated user, tools, and the runner of episodes."""
