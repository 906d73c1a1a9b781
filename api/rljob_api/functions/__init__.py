"""The forms of functions that a user brings, found in their source or in the loaded object. Standard library only."""
