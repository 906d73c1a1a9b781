"""Reads manifests: YAML with positions, validation, and messages that name the field and the remedy."""
