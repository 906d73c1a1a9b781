"""The check of the prose, and the words that it rejects."""
