"""The inside of a worker process: loads a user's function or program, and runs requests. Standard library only."""
