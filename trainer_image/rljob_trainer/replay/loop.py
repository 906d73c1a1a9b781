"""The loop of a replay: the updates of recorded steps, and their records.

    log of a run --> groups of a step, in their order --> advantages --> rows --> trainer.accumulate ... trainer.apply
                                                          '- the job's algorithm, and this code -'

Consumes one file of the log a step; produces metrics.jsonl and a trajectory log like those of the run; waits for the
trainer alone. The step itself is that of driver.loop: StepUpdates builds the rows, and Ledger records.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from rljob_trainer.driver.dispatcher import DispatchState
from rljob_trainer.driver.ledger import Ledger
from rljob_trainer.driver.ports import Trainer
from rljob_trainer.driver.train_lane import LaneState
from rljob_trainer.driver.updates import ScoredGroups, StepOutcome, StepUpdates
from rljob_trainer.episodes.progress import CollectionProgress
from rljob_trainer.episodes.types import Group


class RecordedGroups:
    """The recorded groups of one step, as its updates take them: in the place of the lane, a
    driver.updates.ScoredGroups.

    Invariant: each group is taken once, in the order in which it trained, and groups that one call of the trainer had
    are one call again, as far as the mini-batches of the job allow. So sums of floating-point numbers have their order.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        """`groups`: of a whole step, in the order in which they trained."""
        self._parts = deque(list(part) for _, part in groupby(groups, key=_part_of))

    async def take(self, limit: int, wait_seconds: float | None = None) -> list[Group]:
        """Return the next part, or as much of it as the mini-batch has room for. With `wait_seconds`, which the step
        asks for after it has taken some: nothing, since the next part was another call."""
        if wait_seconds is not None:
            return []
        part = self._parts.popleft()
        if part[limit:]:
            self._parts.appendleft(part[limit:])
        return part[:limit]

    def is_generating(self) -> bool:
        return False

    async def rescore_stale(self, groups: Sequence[Group]) -> None:
        """There is nothing to do: the log has the scores that trained."""


def _part_of(group: Group) -> tuple[int, int]:
    assert group.trained_as is not None, "a group of the log has trained"
    return group.trained_as.update, group.trained_as.part


@dataclass
class ReplayLoop:
    """`read`: returns the groups of a step, in the order in which they trained."""

    trainer: Trainer
    updates: StepUpdates
    ledger: Ledger
    read: Callable[[int], list[Group]]

    async def run(self, steps: Sequence[int]) -> None:
        """Train on these steps, one after the other."""
        for step in steps:
            await self._replay(step, await asyncio.to_thread(self.read, step))
        await self.ledger.trajectories.flush()
        await self.ledger.write_summary()

    async def _replay(self, step: int, groups: list[Group]) -> None:
        ledger = self.ledger
        ledger.history.step = step - 1
        ledger.begin_step()
        outcome = await self._update(step - 1, RecordedGroups(groups))
        with ledger.clock.publishing():
            manifest = await self.trainer.publish(step)
        ledger.record_published(manifest)
        ledger.record_weights(manifest, {})
        await ledger.trajectories.flush()  # of the previous step: never hold two in memory
        await ledger.record_step(outcome, LaneState(dispatch=DispatchState()), CollectionProgress())

    async def _update(self, version: int, source: ScoredGroups) -> StepOutcome:
        outcome = StepOutcome()
        for batch in self.updates.mini_batches(version):
            async for rows in self.updates.rows(batch, source):
                with self.ledger.clock.training():
                    await self.trainer.accumulate(rows, batch.versions)
            with self.ledger.clock.training():
                outcome.add(batch, await self.trainer.apply(batch.denominator))
        return outcome
