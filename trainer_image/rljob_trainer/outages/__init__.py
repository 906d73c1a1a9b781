"""Outages of what a job depends on, and how it waits for their end."""
