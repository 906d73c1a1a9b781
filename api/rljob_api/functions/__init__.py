"""The forms of functions that a user brings, found in the loaded object. Standard library only."""
