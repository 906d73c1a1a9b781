"""Breaks the pure cores on purpose, one change at a time, and counts what their tests notice."""
