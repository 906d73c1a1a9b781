"""Requests to the API server: one session, its errors, and the kinds that RLJob reads and writes."""
