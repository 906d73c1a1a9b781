"""What the Pods of a job send to each other: environment names, paths, messages of the reward protocol."""
