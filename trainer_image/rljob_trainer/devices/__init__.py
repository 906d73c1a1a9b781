"""The device of a process: as the job's spec says, or an error that names what is missing."""
