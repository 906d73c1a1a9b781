"""The Ray actors around the ranks, and how they start and end."""
