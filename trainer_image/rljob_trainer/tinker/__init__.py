"""A training service for clients of Tinker's SDK: its wire, over the ranks and rollouts of a job without a driver."""
