"""Advantages and losses: pure functions of numbers and tensors."""
