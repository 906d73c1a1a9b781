"""Rewards by a sequence classifier."""
