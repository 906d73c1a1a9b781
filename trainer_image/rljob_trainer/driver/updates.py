"""Scored groups to optimizer updates, as they come.

Consumes: groups in the order in which they are scored. Produces: updates. Waits for: enough groups for a mini-batch,
while the rewards of the others are still under way. Unblocked by: the last reward of those groups. Invariant: the
step stays on-policy: every ratio is to the weights that sampled.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, Protocol

from rljob_api.manifest.job import RLJobSpec
from rljob_api.wire.protocol import WeightManifest
from rljob_trainer.driver.collection import Progress
from rljob_trainer.driver.status import Board
from rljob_trainer.episodes.batches import Group, build_samples
from rljob_trainer.episodes.types import TrainSample, Trajectory, UpdateMetrics


class Trainer(Protocol):
    """What the driver needs of trainer_group.TrainerGroup."""

    async def update(self, samples: list[TrainSample]) -> UpdateMetrics: ...
    async def compute_logprobs(self, samples: list[TrainSample]) -> list[list[float]]: ...
    async def set_steps(self, steps: int) -> None: ...
    async def publish(self, version: int) -> WeightManifest: ...
    async def save(self, folder: Path) -> None: ...
    async def export(self, folder: Path, tokenizer_source: str) -> None: ...
    async def watch(self) -> NoReturn: ...
    async def close(self) -> None: ...


@dataclass
class StepOutcome:
    """What a step's groups became."""

    groups: list[Group] = field(default_factory=list)
    """In the order of the data."""
    updates: list[UpdateMetrics] = field(default_factory=list)
    update_seconds: float = 0.0
    """Log-probs and updates."""


async def update_on(
    scored: AsyncGenerator[Group],
    trainer: Trainer,
    spec: RLJobSpec,
    progress: Progress,
    board: Board,
    on_update: Callable[[], None],
    settle: Callable[[Sequence[Group]], Awaitable[None]],
) -> StepOutcome:
    """Do a step's updates, each as soon as its groups are scored. `on_update` is called before each; `settle` before
    scores are used, and may change them."""
    outcome = StepOutcome()
    num_updates, group_size = spec.schedule.mini_batches, spec.algorithm.group_size
    size = spec.schedule.prompts_per_step // num_updates
    # Normalisation by the batch needs the whole batch; else each mini-batch starts when its own groups are there.
    wave_size = spec.schedule.prompts_per_step if spec.algorithm.normalization == "batch" else size
    old_logprobs: dict[tuple[int, int], list[float]] | None = None
    async with aclosing(scored):
        async for wave in in_waves(scored, wave_size):
            if num_updates > 1 and old_logprobs is None:
                await progress.wait_until_generated()
                board.enter("update")
                began = time.monotonic()
                old_logprobs = await compute_old_logprobs(trainer, progress.trajectories)
                outcome.update_seconds += time.monotonic() - began
            board.enter("score")
            await settle(wave)
            samples = build_samples(wave, spec.rewards, spec.algorithm)
            note_advantages(samples, wave)
            board.enter("update")
            began = time.monotonic()
            if old_logprobs is not None:
                samples = attach_logprobs(samples, wave, old_logprobs)
            for start in range(0, len(samples), size * group_size):
                on_update()
                outcome.updates.append(await trainer.update(samples[start : start + size * group_size]))
            outcome.update_seconds += time.monotonic() - began
            outcome.groups += wave
            if len(outcome.groups) < spec.schedule.prompts_per_step:
                board.enter("score")
    outcome.groups.sort(key=lambda group: group.index)
    return outcome


def note_advantages(samples: Sequence[TrainSample], wave: Sequence[Group]) -> None:
    """Write into each trajectory what its update uses, for the trajectory log."""
    trajectories = [trajectory for group in wave for trajectory in group.trajectories]
    for sample, trajectory in zip(samples, trajectories, strict=True):
        trajectory.advantage = sample.advantage if any(sample.loss_mask) else None


async def in_waves(scored: AsyncIterator[Group], size: int) -> AsyncIterator[list[Group]]:
    """Groups by `size`, in the order of their completion; within a wave in the order of the data."""
    wave: list[Group] = []
    async for group in scored:
        wave.append(group)
        if len(wave) == size:
            yield sorted(wave, key=lambda group: group.index)
            wave = []


async def compute_old_logprobs(
    trainer: Trainer, trajectories: Sequence[Trajectory]
) -> dict[tuple[int, int], list[float]]:
    """The trainer's own log-probs of all of the step's trajectories, before its first update."""
    ordered = sorted(trajectories, key=lambda trajectory: (trajectory.group, trajectory.sample))
    samples = [TrainSample(t.token_ids, t.loss_mask, t.logprobs, 0.0) for t in ordered]
    logprobs = await trainer.compute_logprobs(samples)
    return {(t.group, t.sample): found for t, found in zip(ordered, logprobs, strict=True)}


def attach_logprobs(
    samples: Sequence[TrainSample], wave: Sequence[Group], old_logprobs: dict[tuple[int, int], list[float]]
) -> list[TrainSample]:
    """`samples` of `wave`, each with its log-probs before the step's first update."""
    keys = [(t.group, t.sample) for group in wave for t in group.trajectories]
    return [
        dataclasses.replace(sample, old_logprobs=old_logprobs[key]) for sample, key in zip(samples, keys, strict=True)
    ]
