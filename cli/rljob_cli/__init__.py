"""The `rljob` command, also `kubectl rljob`: checks and runs jobs here, and shows and controls them on a cluster."""
