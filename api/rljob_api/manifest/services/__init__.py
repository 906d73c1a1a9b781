"""What has separate Pods besides head, trainer and rollout: rewards, the simulated user, tools and the runner.

One module per kind of service; `base` and `calls` have what they share.
"""
