"""The types of the manifests that a user writes (RLJob, RewardModel) and of their status."""
