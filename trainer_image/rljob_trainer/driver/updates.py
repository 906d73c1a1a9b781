"""Scored groups to optimizer updates, each as soon as the groups of its mini-batch are scored.

Invariant: the step stays on-policy; every ratio is to the weights that sampled.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from rljob_api.manifest.job import RLJobSpec
from rljob_trainer.driver.collection import Collection
from rljob_trainer.driver.ports import Trainer
from rljob_trainer.episodes.batches import Logprobs, build_samples
from rljob_trainer.episodes.types import Episode, Group, TrainSample, UpdateMetrics


@dataclass
class StepOutcome:
    groups: list[Group] = field(default_factory=list)
    """In the order of the data."""
    updates: list[UpdateMetrics] = field(default_factory=list)
    update_seconds: float = 0.0
    """Time of log-probs and updates."""


async def run_updates(
    collection: Collection,
    trainer: Trainer,
    spec: RLJobSpec,
    *,
    set_phase: Callable[[str], None],
    before_update: Callable[[], None],
) -> StepOutcome:
    outcome = StepOutcome()
    num_prompts, num_updates = spec.schedule.prompts_per_step, spec.schedule.mini_batches
    # Normalization by the batch needs the whole batch; otherwise a mini-batch starts when its groups are complete.
    chunk_size = num_prompts if spec.algorithm.normalization == "batch" else num_prompts // num_updates
    update_size = num_prompts // num_updates * spec.algorithm.group_size
    old_logprobs: Logprobs | None = None
    async for chunk in iter_chunks(collection.groups(), chunk_size):
        if num_updates > 1 and old_logprobs is None:
            await collection.progress.wait_until_generated()
            set_phase("update")
            started_at = time.monotonic()
            old_logprobs = await compute_old_logprobs(trainer, collection.progress.episodes)
            outcome.update_seconds += time.monotonic() - started_at
        set_phase("score")
        await collection.rescore_stale(chunk)
        samples = build_samples(chunk, spec.rewards, spec.algorithm, old_logprobs)
        episodes = [episode for group in chunk for episode in group.episodes]
        for sample, episode in zip(samples, episodes, strict=True):
            episode.advantage = sample.advantage if any(sample.loss_mask) else None
        set_phase("update")
        started_at = time.monotonic()
        for start in range(0, len(samples), update_size):
            before_update()
            outcome.updates.append(await trainer.update(samples[start : start + update_size]))
        outcome.update_seconds += time.monotonic() - started_at
        outcome.groups += chunk
        if len(outcome.groups) < num_prompts:
            set_phase("score")
    outcome.groups.sort(key=lambda group: group.index)
    return outcome


async def iter_chunks(groups: AsyncIterator[Group], size: int) -> AsyncIterator[list[Group]]:
    """Yield groups in chunks of `size`, in the order of completion; within a chunk in the order of the data."""
    chunk: list[Group] = []
    async for group in groups:
        chunk.append(group)
        if len(chunk) == size:
            yield sorted(chunk, key=lambda group: group.index)
            chunk = []


async def compute_old_logprobs(trainer: Trainer, episodes: Sequence[Episode]) -> Logprobs:
    """Return the trainer's log-probs of all of the step's episodes, before its first update."""
    ordered = sorted(episodes, key=lambda episode: (episode.group, episode.sample))
    samples = [TrainSample(s.token_ids, s.loss_mask, s.logprobs, 0.0) for e in ordered for s in e.segments]
    logprobs = await trainer.compute_logprobs(samples)
    return {(t.group, t.sample): found for t, found in zip(ordered, logprobs, strict=True)}
