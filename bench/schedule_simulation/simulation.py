"""Discrete-event simulation of a job with the driver's own dispatcher and schedules.

    groups admitted --> rollouts --> reward slots --> scored --> schedule.take --> trainer --> publish --> next step

Owns the clock. What a step may take and what may start is decided by rljob_trainer.driver, as in a real job. The
trainer is a generator: it yields the seconds that it works, or None while it waits for a change.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from rljob_trainer.driver.dispatcher import Dispatcher
from rljob_trainer.driver.schedules import StepSchedule
from schedule_simulation.roles import RewardSlots, Rollouts, Shape

_NEVER = float("inf")


@dataclass
class StepRecord:
    ended_at: float
    staleness: list[int]
    """[groups]"""
    tokens: list[float]
    """[samples] Lengths trained."""


@dataclass
class Timeline:
    """What each role did when. Curves have a point per change."""

    rollouts: list[tuple[float, int]] = field(default_factory=list)
    """(time, sequences decoded)"""
    rewards: list[tuple[float, int]] = field(default_factory=list)
    """(time, slots that execute)"""
    trains: list[tuple[float, float]] = field(default_factory=list)
    """(begin, end)"""
    publishes: list[tuple[float, float]] = field(default_factory=list)
    sampled: dict[int, float] = field(default_factory=dict)
    """Group -> when its last sequence ended."""


class NearDispatcher(Dispatcher):
    """Starts groups for fewer steps ahead than the staleness allows: p < k. All that dispatcher.py proves holds, as
    fewer groups start. If rollouts are faster than the trainer, data is p steps old on average, and the other k - p
    steps are slack that only slow groups use. With p = k all data is k steps old then, and each group is due when it
    trains. The driver does not do this."""

    def __init__(self, groups_per_step: int, max_staleness: int, steps_ahead: int) -> None:
        super().__init__(groups_per_step, max_staleness)
        self._step_groups, self._steps_ahead = groups_per_step, steps_ahead

    def can_start(self) -> bool:
        num_steps = self.finished_steps + self._steps_ahead + 1
        return super().can_start() and self.num_admitted < num_steps * self._step_groups


class Simulation:
    def __init__(self, shape: Shape, schedule: StepSchedule, steps_ahead: int | None = None, seed: int = 0) -> None:
        """`steps_ahead`: see NearDispatcher; None: the driver's."""
        self.shape, self.schedule, self.now = shape, schedule, 0.0
        size, staleness = shape.groups_per_step, schedule.max_staleness
        self.dispatcher = Dispatcher(size, staleness)
        if steps_ahead is not None:
            self.dispatcher = NearDispatcher(size, staleness, steps_ahead)
        self.rollouts, self.rewards = Rollouts(shape), RewardSlots(shape.slots)
        self.steps: list[StepRecord] = []
        self.timeline = Timeline()
        self._seed = seed
        self._tokens: dict[int, list[float]] = {}
        """Group -> lengths of its samples."""
        self._reward_seconds: dict[int, float] = {}
        """Sample -> latency of its reward."""
        self._missing: Counter[int] = Counter()
        """Group -> samples without a score."""
        self._is_updating = False
        """Whether starts wait for a weight update."""

    def run(self, num_steps: int) -> Simulation:
        self._start_groups()
        trainer, wakes_at = self._train(num_steps), 0.0
        while True:
            self.now = min(wakes_at, self.rollouts.next_end(), self.rewards.next_end())
            if self.now == self.rewards.next_end():
                self._record_score(self.rewards.pop(self.now))
            elif self.now == self.rollouts.next_end():
                sample = self.rollouts.pop(self.now)
                self.timeline.sampled[sample // self.shape.group_size] = self.now
                self.rewards.submit(self.now, sample, self._reward_seconds[sample])
            else:
                wakes_at = _NEVER
            if wakes_at == _NEVER:
                try:
                    seconds = next(trainer)
                except StopIteration:
                    return self
                wakes_at = _NEVER if seconds is None else self.now + seconds
            self.timeline.rollouts.append((self.now, self.rollouts.num_running))
            self.timeline.rewards.append((self.now, self.rewards.num_running))

    def _train(self, num_steps: int) -> Iterator[float | None]:
        shape = self.shape
        size = shape.groups_per_step // shape.mini_batches
        for step in range(num_steps):
            record = StepRecord(0.0, [], [])
            for _ in range(shape.mini_batches):
                missing = size
                while missing:
                    if shape.shares_gpus and self.rollouts.num_running:
                        yield None
                        continue
                    tickets = self.schedule.take(self.dispatcher, missing)
                    if not tickets:
                        yield None
                        continue
                    missing -= len(tickets)
                    tokens = [length for ticket in tickets for length in self._tokens.pop(ticket.index)]
                    record.staleness += [step - ticket.version for ticket in tickets]
                    record.tokens += tokens
                    seconds = sum(tokens) / shape.train_tokens_per_second
                    self.timeline.trains.append((self.now, self.now + seconds))
                    yield seconds
            yield from self._publish()
            record.ended_at = self.now
            self.steps.append(record)

    def _publish(self) -> Iterator[float | None]:
        seconds = self.shape.publish_seconds
        if not self.schedule.spans_updates:
            self._is_updating = True
            while self.rollouts.num_running:
                yield None
        self.timeline.publishes.append((self.now, self.now + seconds))
        self.rollouts.pause(self.now, seconds)
        yield seconds
        self._is_updating = False
        self.dispatcher.finish_step()
        self._start_groups()

    def _start_groups(self) -> None:
        while not self._is_updating and self.dispatcher.can_start():
            index = self.dispatcher.start().index
            draw = random.Random(f"{self._seed}/{index}")  # the same groups for each schedule
            self._tokens[index] = [self.shape.lengths.draw(draw) for _ in range(self.shape.group_size)]
            self._missing[index] = self.shape.group_size
            for number, tokens in enumerate(self._tokens[index]):
                sample = index * self.shape.group_size + number
                self._reward_seconds[sample] = self.shape.reward_seconds.draw(draw)
                self.rollouts.submit(self.now, sample, tokens)

    def _record_score(self, sample: int) -> None:
        group = sample // self.shape.group_size
        self._missing[group] -= 1
        if not self._missing[group]:
            self.dispatcher.record_scored(group)


def step_seconds(simulation: Simulation, skip: int) -> float:
    """Return the mean time of a step, without the first ones, which fill the pipeline."""
    ends = [step.ended_at for step in simulation.steps]
    return (ends[-1] - ends[skip - 1]) / (len(ends) - skip)
