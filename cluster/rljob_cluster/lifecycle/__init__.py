"""Starts, supervises and removes a whole cluster."""
