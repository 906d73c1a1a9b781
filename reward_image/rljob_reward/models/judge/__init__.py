"""Rewards by a chat model: template, parser, votes, limits, and the caller that puts them together."""
