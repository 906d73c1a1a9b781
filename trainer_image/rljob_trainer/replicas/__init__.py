"""Clients of a set of equal servers: discovery, leases, hedging, and the rollout client."""
