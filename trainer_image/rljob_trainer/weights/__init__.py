"""Publishes weights: digests, files and the server that rollouts download from."""
