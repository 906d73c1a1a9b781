"""Clients of the rewards: retries, groups, versions and demand."""
