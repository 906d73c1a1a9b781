"""One step of the driver, without ranks: its own updates and its own ledger, in the loop that serves /status."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.job_sections import Tracking
from rljob_api.manifest.quantity import Size
from rljob_trainer.algorithms.registry import build_algorithm
from rljob_trainer.driver.dispatcher import DispatchState
from rljob_trainer.driver.ledger import Ledger
from rljob_trainer.driver.ports import Trainer
from rljob_trainer.driver.reports import Reports
from rljob_trainer.driver.role_clock import PhaseClock, RoleClock
from rljob_trainer.driver.run_clock import RunClock
from rljob_trainer.driver.status import StatusBoard
from rljob_trainer.driver.train_lane import LaneState
from rljob_trainer.driver.updates import StepOutcome, StepUpdates
from rljob_trainer.episodes.progress import CollectionProgress
from rljob_trainer.episodes.types import Group, TrainRow, UpdateMetrics, UpdateVersions
from rljob_trainer.history.disk import RunDisk
from rljob_trainer.history.prometheus import PrometheusMetrics
from rljob_trainer.history.run_state import History
from rljob_trainer.history.tracking import Trackers
from rljob_trainer.history.trajectory_log import TrajectoryLog
from rljob_trainer.policy.layout import PACKED_TREES, divide_rows

_UPDATE = UpdateMetrics(0.1, 0.1, 0.0, 1.0, 1.0, 1e-6, 0.0, 0.01, 1, 1, 1.0)


class Scored:
    """Implements updates.ScoredGroups: all groups are scored at once, which is the worst case."""

    def __init__(self, groups: list[Group]) -> None:
        self._groups = groups

    async def take(self, limit: int, wait_seconds: float | None = None) -> list[Group]:
        taken, self._groups = self._groups[:limit], self._groups[limit:]
        return taken

    def is_generating(self) -> bool:
        return False

    async def rescore_stale(self, groups: Sequence[Group]) -> None: ...


class Books:
    """The ledger of a run, and what it reports to."""

    def __init__(self, job: RLJob, run_dir: Path) -> None:
        self.board, self.prometheus = StatusBoard(), PrometheusMetrics()
        self.job, self.algorithm = job, build_algorithm(job.spec)
        now, history = time.monotonic(), History(step=3)
        self.ledger = Ledger(
            run_dir,
            history,
            Reports(self.board, Trackers(), self.prometheus, _decode),
            RunClock(run_dir, history, self.board, self.prometheus, RoleClock(now), PhaseClock(now)),
            algorithm=self.algorithm,
            schedule=job.spec.schedule,
            spec=job.spec.model_copy(update={"tracking": Tracking(trajectories_size=Size("0"))}),
            disk=RunDisk(run_dir),
        )
        size = job.spec.tracking.trajectories_size.num_bytes
        self.trajectories = TrajectoryLog(run_dir, size, _decode)


async def build_rows(books: Books, groups: list[Group]) -> tuple[StepOutcome, list[TrainRow]]:
    """Return the step's outcome and its rows, as the loop's `_update` does."""
    schedule, trainer = books.job.spec.schedule, cast(Trainer, None)  # grpo inspects nothing
    updates = StepUpdates(schedule, books.algorithm, trainer, nullcontext, full_tokens=1)
    outcome, rows, source = StepOutcome(), list[TrainRow](), Scored(list(groups))
    for batch in updates.mini_batches(3):
        async for some in updates.rows(batch, source):
            rows += some
        outcome.add(batch, _UPDATE)
    return outcome, rows


async def ship(books: Books, rows: Sequence[TrainRow]) -> int:
    """Divide the rows among the ranks and copy what each gets, as TrainerGroup does. Return the bytes."""
    trainer = books.job.spec.trainer
    parts = await asyncio.to_thread(
        divide_rows,
        rows,
        num_ranks=trainer.num_ranks,
        micro_batch_tokens=trainer.largest_micro_batch,
        layout=PACKED_TREES,
        without_advantage=False,
        versions=UpdateVersions(3, 3, 4),
    )
    return await asyncio.to_thread(lambda: sum(map(_copy, parts)))


async def record(books: Books, outcome: StepOutcome) -> None:
    progress = CollectionProgress("train", 0)
    progress.episodes = [episode for group in outcome.groups for episode in group.episodes]
    lane = LaneState(dispatch=DispatchState(finished_steps=4))
    recorded: Any = books.ledger.record_step(outcome, lane, progress)
    if inspect.isawaitable(recorded):
        await recorded


async def write_log(books: Books, groups: list[Group]) -> None:
    books.trajectories.record("train", 4, groups)
    await books.trajectories.flush()
    await books.trajectories.close()


def _copy(part: Any) -> int:
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(part, protocol=5, buffer_callback=buffers.append)
    return len(head) + sum(len(bytes(buffer)) for buffer in buffers)


def _decode(token_ids: list[int]) -> str:
    """Stands for a tokenizer, which also holds the interpreter for some hundred ns a token."""
    return " ".join(map(str, token_ids))
