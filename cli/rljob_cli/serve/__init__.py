"""`rljob serve`: a training service for clients of Tinker's SDK, on this machine."""
