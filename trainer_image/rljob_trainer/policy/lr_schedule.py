"""The learning rate of each optimizer update, as a pure function of its index and of the job's length. No state, so
that resume is exact.

When schedule.steps changes while the job runs, each update from then on has the rate that it would have had in a job
of the new length. Constant rates and warm-ups stay as they are; a linear decay that is at half of its peak, since 50 of
100 steps are done, is at three quarters once there are to be 200.
"""

from __future__ import annotations

import math

from rljob_api.manifest.job import Optimizer


def learning_rate(optimizer: Optimizer, update: int, total_updates: int) -> float:
    """Rate of the 0-based `update`. The warm-up ends at the peak; linear and cosine end at peak * min_ratio."""
    peak = optimizer.learning_rate
    if update < optimizer.warmup_steps:
        return peak * (update + 1) / optimizer.warmup_steps
    if optimizer.schedule == "constant":
        return peak
    num_decay = max(1, total_updates - optimizer.warmup_steps)
    progress = min(1.0, (update - optimizer.warmup_steps) / num_decay)
    remaining = 1 - progress if optimizer.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return peak * (optimizer.min_ratio + (1 - optimizer.min_ratio) * remaining)
