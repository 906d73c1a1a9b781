"""Acceptance of a machine with a GPU: what is run, what must hold, and the table of what held."""
