"""The plan of a trainer rank's memory against torch's memory tracker, and against the resident memory of a process."""
