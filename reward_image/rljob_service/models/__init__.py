"""Rewards that are models: classifiers and judges, and the clients of their endpoints."""
