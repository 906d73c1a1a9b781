"""The groups in flight of training: starts those that the schedule admits, and hands over those that may train.

    data cursor --> group admitted (dispatcher) --> episodes --> rewards --> scored --> taken by a step

Owns the tasks of the groups; the dispatcher decides. Invariant: a snapshot has every prompt that was taken from the
data and has not been trained on, so a lane that continues from it trains each prompt once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pydantic import BaseModel

from rljob_api.manifest.schedule import Schedule
from rljob_api.wire.driver_status import ScheduleStatus
from rljob_trainer.algorithms.base import AlgorithmCode
from rljob_trainer.algorithms.rows import should_replace
from rljob_trainer.concurrency import end_tasks
from rljob_trainer.driver.collection import CollectionPlan, Collector
from rljob_trainer.driver.dispatcher import Dispatcher, DispatchState, Ticket
from rljob_trainer.driver.schedules import StepSchedule, build_schedule
from rljob_trainer.episodes.progress import CollectionProgress
from rljob_trainer.episodes.types import Group
from rljob_trainer.feed.prompt_feed import FeedState, PromptFeed, PromptKey
from rljob_trainer.history.run_state import History


class LaneState(BaseModel):
    """What a checkpoint needs of the lane."""

    dispatch: DispatchState
    prompts: dict[int, PromptKey] = {}
    """Number of a group that was started and not trained on -> its prompt."""
    feed: FeedState = FeedState()
    """From which the prompts of the next groups follow."""


def read_lane_state(history: History) -> LaneState:
    """Return the state in a checkpoint, or that before the first step."""
    return LaneState.model_validate(history.lane) if history.lane else LaneState(dispatch=DispatchState())


@dataclass(frozen=True)
class _Scored:
    group: Group
    is_replaceable: bool
    """Whether another group should train in its place."""


@dataclass(frozen=True)
class _Running:
    ticket: Ticket
    plan: CollectionPlan
    task: asyncio.Task[_Scored]


class TrainLane:
    """Use it as a context: leaving it cancels all groups."""

    def __init__(
        self,
        collector: Collector,
        feed: PromptFeed,
        plan: CollectionPlan,
        schedule: Schedule,
        algorithm: AlgorithmCode,
        state: LaneState,
        *,
        rewards_sleep: bool = False,
    ) -> None:
        """`feed`: from `state`. `plan`: whatever its step, each group has that in which it starts. `rewards_sleep`:
        rewards cannot score again once the step trains."""
        self._collector, self._feed, self.plan, self._algorithm = collector, feed, plan, algorithm
        self._groups_per_step = schedule.prompts_per_step
        self.schedule: StepSchedule = build_schedule(schedule)
        self._dispatcher = Dispatcher(
            schedule.prompts_per_step,
            self.schedule.max_staleness,
            state.dispatch,
            max_replacements=algorithm.settings.max_replacements,
            first_step=schedule.num_warm_steps,
        )
        self._to_restart = self._dispatcher.tickets_to_restart
        self._rescores_early = rewards_sleep
        self._prompts = dict(state.prompts)
        self._running: dict[int, _Running] = {}
        """By number of the group: in flight, or scored."""
        self._taken: dict[int, _Running] = {}
        """Those of the current step."""
        self._changed = asyncio.Event()
        self.num_replaced = 0
        """Groups without signal in this step."""
        self.progress = CollectionProgress(group_size=plan.group_size)
        """Progress of the current or the last step."""
        self.is_in_step = False
        self._groups_at_once = 0
        """Those in flight at the begin of the current or the last step."""

    async def __aenter__(self) -> TrainLane:
        return self

    async def __aexit__(self, *_: object) -> None:
        running, self._running = [each.task for each in self._running.values()], {}
        await end_tasks(*running)

    @property
    def finished_steps(self) -> int:
        return self._dispatcher.finished_steps

    @property
    def num_skipped(self) -> int:
        """Prompts that the curriculum has passed over since the current or the last step began."""
        return self._feed.num_skipped

    @property
    def num_collected(self) -> int:
        """Steps for which no further episode is needed."""
        return self.finished_steps + (self.is_in_step and not self.progress.num_unscored)

    @property
    def num_generated(self) -> int:
        """Steps whose episodes have all ended."""
        return self.finished_steps + (self.is_in_step and not self.is_generating())

    @property
    def episodes_at_once(self) -> int:
        """Episodes that the schedule wants in flight at once: in this step, or when the next one begins."""
        dispatcher = self._dispatcher
        groups = self._groups_at_once if self.is_in_step else dispatcher.num_in_flight + dispatcher.num_startable
        return groups * self.plan.group_size

    def is_generating(self) -> bool:
        """Whether completions of the groups that this step may train on are still open."""
        return self.progress.num_generated < self.progress.num_samples

    def begin_step(self, last_step: int) -> None:
        """Start what may start. `last_step`: groups that no step up to it would train on are not started."""
        self._dispatcher.total_steps, self.num_replaced, self._feed.num_skipped = last_step, 0, 0
        num_samples = self._dispatcher.num_left * self.plan.group_size
        self.progress = CollectionProgress("train", num_samples, self.plan.group_size, started_at=time.monotonic())
        self.is_in_step = True
        self._collector.rewards.begin()
        for ticket in self._to_restart:
            self._start(ticket)
        self._to_restart = ()
        self._fill()
        self._groups_at_once = self._dispatcher.num_in_flight

    async def take(self, limit: int, wait_seconds: float | None = None) -> list[Group]:
        """Wait for groups that may train now, and return at most `limit`, in the order of the data; none if
        `wait_seconds` pass before. None: wait as long as it takes."""
        tickets: Sequence[Ticket] = ()
        try:
            async with asyncio.timeout(wait_seconds) as waiting:
                while True:
                    self._raise_failure()
                    if tickets := self.schedule.take(self._dispatcher, limit):
                        break
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            if not waiting.expired():  # of a group
                raise
        for ticket in tickets:
            self._taken[ticket.index] = self._running.pop(ticket.index)
        return [self._taken[ticket.index].task.result().group for ticket in tickets]

    async def wait_until_scored(self) -> None:
        """Wait until all groups that the step still needs are scored. Raise why a group failed, if one has."""
        while self.is_in_step and self._dispatcher.num_scored < self._dispatcher.num_left:
            self._raise_failure()
            self._changed.clear()
            await self._changed.wait()
        if self._rescores_early:
            await self._rescore([each for each in self._running.values() if each.task.done()])

    def _raise_failure(self) -> None:
        """Raise why a group failed, if one has."""
        for each in self._running.values():
            if each.task.done() and (error := each.task.exception()) is not None:
                raise error

    async def rescore_stale(self, groups: Sequence[Group]) -> None:
        """Rescore what an older version of a reward scored. Call it before the scores are used."""
        if not self._rescores_early:
            await self._rescore([self._taken[group.index] for group in groups])

    async def _rescore(self, scored: Sequence[_Running]) -> None:
        for each in scored:
            await self._collector.rescore_stale([each.task.result().group], each.plan, lambda: self.progress)

    def finish_step(self) -> None:
        self._dispatcher.finish_step()
        for index, taken in self._taken.items():
            self._feed.record(self._prompts.pop(index), taken.task.result().group)
        self._feed.finish_step()
        self._taken = {}
        self.is_in_step = False

    def snapshot(self) -> LaneState:
        return LaneState(dispatch=self._dispatcher.snapshot(), prompts=dict(self._prompts), feed=self._feed.snapshot())

    def describe(self, before: ScheduleStatus) -> ScheduleStatus:
        """Return `before` with what changes by the second."""
        dispatcher, running = self._dispatcher, self._running.values()
        oldest = min((each.ticket.version for each in running), default=None)
        return before.model_copy(
            update={
                "staleness": None if oldest is None else self.finished_steps - oldest,
                "groups_in_flight": dispatcher.num_in_flight,
                "groups_scored": dispatcher.num_scored,
                "groups_due": len(dispatcher.waits_for()) if self.is_in_step else 0,
            }
        )

    def _fill(self) -> None:
        """Start groups as long as the schedule admits them and a step will train on them."""
        while self._dispatcher.can_start():
            ticket = self._dispatcher.start()
            self._prompts[ticket.index] = self._feed.draw()
            self._start(ticket)

    def _start(self, ticket: Ticket) -> None:
        group = Group(ticket.index, self._feed.prompt(self._prompts[ticket.index]))
        plan = replace(self.plan, step=ticket.version + 1)
        task = asyncio.create_task(self._run(group, plan))
        self._running[ticket.index] = _Running(ticket, plan, task)
        task.add_done_callback(lambda task: self._record_done(ticket, task))

    async def _run(self, group: Group, plan: CollectionPlan) -> _Scored:
        await self._collector.run_group(group, plan, lambda: self.progress)
        return _Scored(group, should_replace(group, self._algorithm))

    def _record_done(self, ticket: Ticket, task: asyncio.Task[_Scored]) -> None:
        if task.cancelled() or ticket.index not in self._running:
            return
        if task.exception() is None:
            if task.result().is_replaceable and self._dispatcher.can_replace():
                self._replace(ticket)
            else:
                self._dispatcher.record_scored(ticket.index)
        self._changed.set()

    def _replace(self, ticket: Ticket) -> None:
        self._dispatcher.replace(ticket.index)
        replaced = self._running.pop(ticket.index).task.result().group
        self._feed.record(self._prompts.pop(ticket.index), replaced)
        self.num_replaced += 1
        if self.is_in_step:  # between two steps, the rollouts serve weights that are older than a new ticket
            self._fill()
