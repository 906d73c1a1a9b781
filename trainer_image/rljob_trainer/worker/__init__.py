"""The process of a trainer Pod."""
