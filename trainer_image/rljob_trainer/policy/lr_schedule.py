"""The learning rate of each optimizer update: a pure function of its index and the job's length, so resume is exact.

If schedule.steps changes while the job runs, each later update uses the rate of a job with the new length. Constant
rates and warm-ups do not change. A linear decay at 50 of 100 steps is at half of its peak; once the job has 200 steps,
it is at three quarters.
"""

import math

from rljob_api.manifest.algorithm import Optimizer


def learning_rate(optimizer: Optimizer, update: int, total_updates: int) -> float:
    """Return the rate of the 0-based `update`. A warm-up ends at the peak, linear and cosine at peak * min_ratio."""
    peak = optimizer.learning_rate
    if update < optimizer.warmup_steps:
        return peak * (update + 1) / optimizer.warmup_steps
    if optimizer.schedule == "constant":
        return peak
    num_decay = max(1, total_updates - optimizer.warmup_steps)
    progress = min(1.0, (update - optimizer.warmup_steps) / num_decay)
    remaining = 1 - progress if optimizer.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return peak * (optimizer.min_ratio + (1 - optimizer.min_ratio) * remaining)
