"""The updates of one step: scored groups to gradients, each as soon as it may train.

    take groups --> [inspect] --> advantages --> rows --> accumulate        as long as the mini-batch needs groups
                                                              apply         once it is complete

Invariant: every group of the step is in exactly one update, and the update is that of its whole mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from rljob_api.manifest.job import RLJobSpec
from rljob_trainer.algorithms.base import AlgorithmCode
from rljob_trainer.driver.ports import Trainer
from rljob_trainer.driver.train_lane import TrainLane
from rljob_trainer.episodes.batches import (
    build_rows,
    denominator,
    episode_rewards,
    inspection_rows,
    record_advantages,
)
from rljob_trainer.episodes.types import Group, TrainRow, UpdateMetrics, UpdateVersions

_GATHER_SECONDS = 0.2
"""Wait for the next scored group before the earlier ones train. The scores of a fast reward arrive within it, and a
call of the trainer costs more: 1.3 s for a model of 135M parameters on two CPU ranks."""


@dataclass
class StepOutcome:
    groups: list[Group] = field(default_factory=list)
    """In the order of dispatch."""
    updates: list[UpdateMetrics] = field(default_factory=list)
    num_replaced: int = 0
    """Groups without signal that others replaced."""

    @property
    def update_seconds(self) -> float:
        return sum(update.seconds for update in self.updates)


@dataclass(frozen=True)
class _Prepared:
    """A group that is ready for an update."""

    group: Group
    rows: list[TrainRow]


class StepUpdates:
    """Runs the updates of one step after the other."""

    def __init__(
        self,
        spec: RLJobSpec,
        algorithm: AlgorithmCode,
        trainer: Trainer,
        training: Callable[[], AbstractContextManager[None]],
        before_apply: Callable[[], None],
    ) -> None:
        """`training`: the context of each call of the trainer, for the clocks."""
        self._spec, self._algorithm, self._trainer = spec, algorithm, trainer
        self._training, self._before_apply = training, before_apply
        # Rows below this number of tokens do not fill a micro-batch on each rank.
        self._full_tokens = spec.trainer.micro_batch_tokens * spec.trainer.num_ranks

    async def run(self, lane: TrainLane) -> StepOutcome:
        schedule, outcome, version = self._spec.schedule, StepOutcome(), lane.finished_steps
        size = schedule.prompts_per_step // schedule.mini_batches
        whole = await self._prepare_step(lane) if self._algorithm.needs.whole_step else None
        for number in range(schedule.mini_batches):
            current = version + number / schedule.mini_batches
            end = version + 1 if self._algorithm.DEFAULTS.clips_stale_tokens else current
            versions = UpdateVersions(version, current, end)
            if whole is None:
                groups = await self._stream(lane, size, versions)
            else:
                part = whole[number * size : (number + 1) * size]
                groups = [each.group for each in part]
                await self._accumulate(part, versions)
            self._before_apply()
            with self._training():
                outcome.updates.append(await self._trainer.apply(denominator(groups, self._spec)))
            outcome.groups += groups
        outcome.groups.sort(key=lambda group: group.index)
        outcome.num_replaced = lane.num_replaced
        return outcome

    async def _prepare_step(self, lane: TrainLane) -> list[_Prepared]:
        """Wait for all groups of the step. A statistic of all of them enters each advantage."""
        groups: list[Group] = []
        while missing := self._spec.schedule.prompts_per_step - len(groups):
            groups += await lane.take(missing)
        return await self._prepare(lane, groups)

    async def _stream(self, lane: TrainLane, size: int, versions: UpdateVersions) -> list[Group]:
        """Accumulate groups as they come, in few calls: each reads all weights and reduces all gradients. So wait for
        a full micro-batch while the step's completions are open, and after that for scores that follow at once."""
        groups: list[Group] = []
        pending: list[Group] = []
        while len(groups) < size:
            taken = await lane.take(size - len(groups), _GATHER_SECONDS if pending else None)
            groups, pending = groups + taken, pending + taken
            num_tokens = sum(episode.num_tokens for group in pending for episode in group.episodes)
            more_may_come = len(groups) < size and (bool(taken) or lane.is_generating())
            if more_may_come and num_tokens < self._full_tokens:
                continue
            await self._accumulate(await self._prepare(lane, pending), versions)
            pending = []
        return groups

    async def _accumulate(self, prepared: Sequence[_Prepared], versions: UpdateVersions) -> None:
        with self._training():
            await self._trainer.accumulate([row for each in prepared for row in each.rows], versions)

    async def _prepare(self, lane: TrainLane, groups: Sequence[Group]) -> list[_Prepared]:
        await lane.rescore_stale(groups)
        needs, spec, facts = self._algorithm.needs, self._spec, None
        if needs.reference or needs.values:
            with self._training():
                facts = await self._trainer.inspect(inspection_rows(groups, spec))
        rewards = episode_rewards(groups, spec, facts)
        advantages = self._algorithm.advantages(rewards)
        rows = build_rows(groups, advantages, spec, facts)
        for group, of_group in zip(groups, advantages, strict=True):
            for episode, each in zip(group.episodes, of_group, strict=True):
                record_advantages(episode, each.advantages if each else None)
        return [_Prepared(group, each) for group, each in zip(groups, rows, strict=True)]
