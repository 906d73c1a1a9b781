"""`rljob run`: run a job on this machine, show it live, and report."""
