"""Clients of replicated servers: discovery, leases, hedging, and the rollout client."""
