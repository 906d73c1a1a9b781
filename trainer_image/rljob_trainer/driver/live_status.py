"""What /status says of the moment: which wait the driver is in, in words, and what will be asked of the rewards. Pure
reading.
"""

from __future__ import annotations

import time

from rljob_api.wire.protocol import DriverStatus
from rljob_trainer.driver.collection import Progress
from rljob_trainer.replicas.rollout_client import Rollouts
from rljob_trainer.rewards.clients import Rewards
from rljob_trainer.rewards.forecast import Forecast

_COLLECTING = ("generate", "score", "evaluate")
_AFTER_COLLECTION = ("update", "publish", "sync")


def describe_live(
    status: DriverStatus, progress: Progress, rewards: Rewards, rollouts: Rollouts, forecast: Forecast
) -> DriverStatus:
    """`status` with what changes by the second."""
    collecting = status.phase in _COLLECTING
    is_unscored = progress.num_scored < progress.num_samples
    # The first mini-batches are updated on while the last ones are scored.
    is_open = is_unscored and (collecting or status.phase == "update")
    is_last = _is_last(status, progress)
    status.demand = rewards.demand(forecast.foretell(progress, time.monotonic(), is_open=is_open, is_last=is_last))
    waits = rollouts.describe_wait()
    if collecting:
        if status.phase == "generate" and progress.num_generated == progress.num_samples:
            status.phase = "score"
        waits = waits or _describe_collection(progress, rewards, rollouts)
    elif status.phase != "sync":
        waits = ""  # an older generation's wait is nobody's any more
    if waits:
        status.waits_for = waits
    return status


def _is_last(status: DriverStatus, progress: Progress) -> bool:
    """Whether no step comes after what is under way. A step counts once its weights are served."""
    has_collected = progress.lane == "train" and progress.num_samples > 0
    num_done = status.step + (has_collected and status.phase in _AFTER_COLLECTION)
    return status.phase == "done" or num_done >= status.total_steps > 0


def _describe_collection(progress: Progress, rewards: Rewards, rollouts: Rollouts) -> str:
    num_open = progress.num_samples - progress.num_generated
    if num_open:
        queued = rollouts.replicas.num_waiting
        tail = f", {queued} of them for a free rollout" if queued else ""
        return f"waits for {num_open} of {progress.num_samples} completions{tail}"
    return rewards.describe_wait(progress.num_samples - progress.num_scored, progress.num_samples)
