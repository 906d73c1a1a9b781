"""The parts of /status that change by the second: what the driver waits for, and the demand on the rewards. Pure."""

from __future__ import annotations

import time

from rljob_api.wire.protocol import DriverStatus
from rljob_trainer.episodes.progress import CollectionProgress
from rljob_trainer.replicas.rollout_client import RolloutClient
from rljob_trainer.rewards.clients import RewardClients
from rljob_trainer.rewards.forecast import DemandForecaster

_COLLECTING = ("generate", "score", "evaluate")
_AFTER_COLLECTION = ("update", "publish", "sync")


def describe_live(
    status: DriverStatus,
    progress: CollectionProgress,
    rewards: RewardClients,
    rollouts: RolloutClient,
    forecaster: DemandForecaster,
) -> DriverStatus:
    is_collecting = status.phase in _COLLECTING
    is_unscored = progress.num_scored < progress.num_samples
    # The first mini-batches are updated on while the last ones are scored.
    is_open = is_unscored and (is_collecting or status.phase == "update")
    # A step counts once its weights are served.
    has_collected = progress.lane == "train" and progress.num_samples > 0
    num_done = status.step + (has_collected and status.phase in _AFTER_COLLECTION)
    is_last = status.phase == "done" or num_done >= status.total_steps > 0
    status.demand = rewards.demand(forecaster.predict(progress, time.monotonic(), is_open=is_open, is_last=is_last))
    waits = rollouts.describe_wait()
    if is_collecting:
        if status.phase == "generate" and progress.num_generated == progress.num_samples:
            status.phase = "score"
        waits = waits or _describe_collection(progress, rewards, rollouts)
    elif status.phase != "sync":
        waits = ""  # it concerns an older generation
    if waits:
        status.waits_for = waits
    return status


def _describe_collection(progress: CollectionProgress, rewards: RewardClients, rollouts: RolloutClient) -> str:
    num_open = progress.num_samples - progress.num_generated
    if num_open:
        num_queued = rollouts.replicas.num_waiting
        queued = f", {num_queued} of them for a free rollout" if num_queued else ""
        return f"waits for {num_open} of {progress.num_samples} completions{queued}"
    return rewards.describe_wait(progress.num_samples - progress.num_scored, progress.num_samples)
