"""Pure: from a job, the observed state and the time to the desired state."""
