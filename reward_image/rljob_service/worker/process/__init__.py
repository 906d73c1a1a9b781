"""What makes a process a worker: frames on its socket, its scratch directory, and what a call leaves behind."""
