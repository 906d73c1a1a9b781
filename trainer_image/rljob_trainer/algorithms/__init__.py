"""Advantages and losses: pure functions."""
