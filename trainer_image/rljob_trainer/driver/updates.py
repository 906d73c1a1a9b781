"""The updates of one step: scored groups to rows, each as soon as it may train.

    take groups --> [inspect] --> advantages --> rows         as long as the mini-batch needs groups

The loop accumulates the rows, and applies the update once its mini-batch is complete. Invariant: every group of the
step is in exactly one update, and the update is that of its whole mini-batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from rljob_api.manifest.schedule import Schedule
from rljob_trainer.algorithms.base import AlgorithmCode
from rljob_trainer.algorithms.rows import (
    build_rows,
    denominator,
    episode_rewards,
    find_advantages,
    inspection_rows,
    record_advantages,
)
from rljob_trainer.driver.ports import Trainer
from rljob_trainer.episodes.types import Group, TokenFacts, TrainedAs, TrainRow, UpdateMetrics, UpdateVersions
from rljob_trainer.feed.given_rows import GivenRows

_GATHER_SECONDS = 0.2
"""Wait for the next scored group before the earlier ones train. The scores of a fast reward arrive within it, and a
call of the trainer costs more: 1.3 s for a model of 135M parameters on two CPU ranks."""


class ScoredGroups(Protocol):
    """Where a step takes its groups from."""

    async def take(self, limit: int, wait_seconds: float | None = None) -> list[Group]:
        """Wait for groups that may train now; return at most `limit`, or none if `wait_seconds` pass before."""
        ...

    def is_generating(self) -> bool:
        """Whether completions of groups that the step may train on are still open."""
        ...

    async def rescore_stale(self, groups: Sequence[Group]) -> None:
        """Rescore what an older version of a reward scored."""
        ...


@dataclass
class StepOutcome:
    groups: list[Group] = field(default_factory=list)
    """In the order of dispatch."""
    updates: list[UpdateMetrics] = field(default_factory=list)
    num_replaced: int = 0
    """Groups without signal that others replaced."""
    num_skipped: int = 0
    """Prompts that the curriculum passed over."""
    turns_by_prefix: dict[str, int] = field(default_factory=dict)
    """See Fleet.num_picked."""

    given: list[int] = field(default_factory=list)
    """Rows of data.warmStart that it trained, in order. Such a step has no groups."""

    @property
    def update_seconds(self) -> float:
        return sum(update.seconds for update in self.updates)

    def add(self, batch: MiniBatch, update: UpdateMetrics) -> None:
        self.groups = sorted([*self.groups, *batch.groups], key=lambda group: group.index)
        self.updates.append(update)
        self.given += batch.given


@dataclass
class MiniBatch:
    """One update of the step."""

    number: int
    versions: UpdateVersions
    groups: list[Group] = field(default_factory=list)
    """Those whose rows have been built."""
    denominator: float = 0.0
    """By which the gradient of these groups is divided: see rows.denominator."""
    num_parts: int = 0
    """In which the rows of these groups were handed over."""
    given: list[int] = field(default_factory=list)
    """See StepOutcome.given."""


@dataclass
class StepUpdates:
    """Builds the rows of one step after the other."""

    schedule: Schedule
    algorithm: AlgorithmCode
    trainer: Trainer
    training: Callable[[], AbstractContextManager[None]]
    """The context of each call of the trainer, for the clocks."""
    full_tokens: int
    """Rows with fewer tokens do not fill a micro-batch on each rank."""
    given: GivenRows | None = None
    """What the steps of the warm start train."""
    _of_step: list[_Prepared] = field(default_factory=list)
    """For an algorithm that needs all groups of the step at once."""

    def mini_batches(self, version: int) -> Iterator[MiniBatch]:
        """Yield the updates of the step that begins with weights of `version`."""
        for number in range(self.schedule.mini_batches):
            current = version + number / self.schedule.mini_batches
            end = version + 1 if self.algorithm.DEFAULTS.clips_stale_tokens else current
            yield MiniBatch(number, UpdateVersions(version, current, end))

    async def rows(self, batch: MiniBatch, source: ScoredGroups) -> AsyncIterator[list[TrainRow]]:
        """Yield the rows of a mini-batch, in few parts: for each, the trainer reads all weights and reduces all
        gradients. So wait for a full micro-batch while completions are open, and after that for scores that follow at
        once."""
        size, pending = self.schedule.prompts_per_step // self.schedule.mini_batches, list[Group]()
        if self.given is not None and batch.versions.proximal < self.schedule.num_warm_steps:
            first = int(batch.versions.proximal) * self.schedule.prompts_per_step + batch.number * size
            batch.given, rows = self.given.take(first, size)
            batch.denominator = float(sum(row.advantages.sum() for row in rows))
            yield rows
            return
        if self.algorithm.needs.whole_step:
            if batch.number == 0:
                self._of_step = await self._prepare_step(source)
            part = self._of_step[batch.number * size : (batch.number + 1) * size]
            yield self._add(batch, part)
            return
        while len(batch.groups) < size:
            missing = size - len(batch.groups) - len(pending)
            taken = await source.take(missing, _GATHER_SECONDS if pending else None)
            pending += taken
            num_tokens = sum(episode.num_tokens for group in pending for episode in group.episodes)
            more_may_come = len(taken) < missing and (bool(taken) or source.is_generating())
            if more_may_come and num_tokens < self.full_tokens:
                continue
            prepared = await self._prepare(source, pending)
            pending = []
            yield self._add(batch, prepared)

    async def _prepare_step(self, source: ScoredGroups) -> list[_Prepared]:
        """Wait for all groups of the step. A statistic of all of them enters each advantage."""
        groups: list[Group] = []
        while missing := self.schedule.prompts_per_step - len(groups):
            groups += await source.take(missing)
        return await self._prepare(source, groups)

    async def _prepare(self, source: ScoredGroups, groups: Sequence[Group]) -> list[_Prepared]:
        """Build the rows of each group, in a thread: they have all tokens of a step, and others wait for the loop."""
        await source.rescore_stale(groups)
        algorithm, facts = self.algorithm, None
        settings, needs = algorithm.settings, algorithm.needs
        if needs.reference or needs.values:
            with self.training():
                facts = await self.trainer.inspect(await asyncio.to_thread(inspection_rows, groups, settings))
        return await asyncio.to_thread(_prepare_groups, groups, algorithm, facts)

    def _add(self, batch: MiniBatch, prepared: Sequence[_Prepared]) -> list[TrainRow]:
        """Add groups to a mini-batch as its next part, and return their rows."""
        first = batch.number * (self.schedule.prompts_per_step // self.schedule.mini_batches) + len(batch.groups)
        for position, each in enumerate(prepared, first):
            each.group.trained_as = TrainedAs(batch.number, batch.num_parts, position)
        batch.num_parts += 1
        batch.groups += [each.group for each in prepared]
        batch.denominator += sum(each.denominator for each in prepared)
        return [row for each in prepared for row in each.rows]


@dataclass(frozen=True)
class _Prepared:
    group: Group
    rows: list[TrainRow]
    denominator: float


def _prepare_groups(
    groups: Sequence[Group], algorithm: AlgorithmCode, facts: Sequence[TokenFacts] | None
) -> list[_Prepared]:
    settings = algorithm.settings
    rewards = episode_rewards(groups, settings, facts)
    advantages = find_advantages(groups, rewards, algorithm)
    rows = build_rows(groups, advantages, settings, facts)
    for of_group in zip(groups, rewards, advantages, strict=True):
        for each in zip(of_group[0].episodes, *of_group[1:], strict=True):
            record_advantages(*each)
    return [_Prepared(group, of, denominator([group], settings)) for group, of in zip(groups, rows, strict=True)]
