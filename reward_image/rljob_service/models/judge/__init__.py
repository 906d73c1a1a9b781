"""Judges: chat models that score completions."""
