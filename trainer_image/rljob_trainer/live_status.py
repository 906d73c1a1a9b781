"""What /status says of the moment: which wait the driver is in, in words, and what will be asked of the rewards. Pure
reading.
"""

from __future__ import annotations

from rljob_api.protocol import DriverStatus
from rljob_trainer.collection import Progress
from rljob_trainer.rewards import Rewards
from rljob_trainer.rollouts import Rollouts

_COLLECTING = ("generate", "score", "evaluate")


def describe_live(status: DriverStatus, progress: Progress, rewards: Rewards, rollouts: Rollouts) -> DriverStatus:
    """`status` with what changes by the second."""
    collecting = status.phase in _COLLECTING
    num_unscored = progress.num_samples - progress.num_scored if collecting else 0
    status.demand = rewards.demand(num_unscored)
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


def _describe_collection(progress: Progress, rewards: Rewards, rollouts: Rollouts) -> str:
    num_open = progress.num_samples - progress.num_generated
    if num_open:
        queued = rollouts.replicas.num_waiting
        tail = f", {queued} of them for a free rollout" if queued else ""
        return f"waits for {num_open} of {progress.num_samples} completions{tail}"
    return rewards.describe_wait(progress.num_samples - progress.num_scored, progress.num_samples)
