"""Ray, the trainer group and the loop of a replay: the updates of recorded steps, in the environment of the head.

    log of a run --> groups of a step, in their order --> advantages --> rows --> trainer.accumulate ... trainer.apply
                                                          '- the job's algorithm, and this code -'

The loop consumes one file of the log a step; produces metrics.jsonl and a trajectory log like those of the run; waits
for the trainer alone. The step itself is that of driver.loop: StepUpdates builds the rows, and Ledger records. What the
run's folder lacks is found before Ray starts. Invariant: the replayed run is only read.
"""

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob, RLJobSpec
from rljob_api.run.folder import checkpoint_folder, trajectory_file
from rljob_inputs.memory.object_store import head_store_bytes
from rljob_inputs.models.own_settings import load_model_settings
from rljob_trainer.algorithms.base import AlgorithmCode
from rljob_trainer.algorithms.registry import build_algorithm
from rljob_trainer.algorithms.rows import score_group
from rljob_trainer.concurrency import run_with_watcher
from rljob_trainer.conversation.template import ChatTemplate
from rljob_trainer.driver.dispatcher import DispatchState
from rljob_trainer.driver.ledger import Ledger
from rljob_trainer.driver.ports import Trainer
from rljob_trainer.driver.reports import Reports
from rljob_trainer.driver.role_clock import PhaseClock, RoleClock
from rljob_trainer.driver.run_clock import RunClock
from rljob_trainer.driver.status import StatusBoard
from rljob_trainer.driver.train_lane import LaneState
from rljob_trainer.driver.updates import ScoredGroups, StepOutcome, StepUpdates
from rljob_trainer.episodes.progress import CollectionProgress
from rljob_trainer.episodes.types import Group
from rljob_trainer.head.environment import Environment
from rljob_trainer.head.inputs import load_tokenizer
from rljob_trainer.head.status_server import StatusServer
from rljob_trainer.history.disk import RunDisk
from rljob_trainer.history.prometheus import PrometheusMetrics
from rljob_trainer.history.recorded_groups import find_unscored, read_groups
from rljob_trainer.history.run_state import FILE_DRIVER, History, open_checkpoint, truncate_to_history
from rljob_trainer.history.tracking import Trackers
from rljob_trainer.history.trajectory_log import Decode
from rljob_trainer.ranks.group import TrainerGroup, connect, disconnect
from rljob_trainer.ranks.ray_head import RayHead
from rljob_trainer.run_folder.file_facts import Checkpoint, DamagedCheckpointError
from rljob_trainer.run_folder.location import RunFolder, read_run_id


class RecordedGroups:
    """The recorded groups of one step, as its updates take them: in the place of the lane, a
    driver.updates.ScoredGroups.

    Invariant: each group is taken once, in the order in which it trained, and groups that one call of the trainer had
    are one call again, as far as the mini-batches of the job allow. So sums of floating-point numbers have their order.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        """`groups`: of a whole step, in the order in which they trained."""
        parts = groupby(groups, key=lambda group: (group.place.update, group.place.part))
        self._parts = deque(list(part) for _, part in parts)

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


_GENERATION = "replay"


@dataclass(frozen=True)
class Settings:
    """What the command passes, as JSON."""

    run: str
    """Folder of the replayed run."""
    checkpoint: int | None
    """Step of its checkpoint from which to start. None: the initial model."""
    steps: list[int]
    """Those to train on, in order."""


def read_settings(path: Path) -> Settings:
    return Settings(**json.loads(path.read_text(encoding="utf-8")))


def read_step(run: Path, spec: RLJobSpec, step: int) -> list[Group]:
    """Return the groups of a step with the scores that the job's weights give. Raise UserError if they do not fit the
    job."""
    path = trajectory_file(run, step, "train")
    groups = read_groups(path)
    if len(groups) != spec.schedule.prompts_per_step:
        raise UserError(
            f"spec.schedule.promptsPerStep must be {len(groups)}, the groups of {path}, got "
            f"{spec.schedule.prompts_per_step}"
        )
    if unscored := find_unscored(groups, [reward.name for reward in spec.training_rewards]):
        raise UserError(
            f"spec.rewards: {path} has no results of {', '.join(sorted(unscored))}, and a replay asks no reward; "
            "remove what the run did not score"
        )
    for group in groups:
        score_group(group, spec.training_rewards, spec.agent.reward_weight)
    return groups


def find_checkpoint(run: Path, step: int | None) -> Checkpoint | None:
    """Return an intact checkpoint of the run. Raise UserError if it is damaged."""
    if step is None:
        return None
    try:
        return open_checkpoint(checkpoint_folder(run, step), FILE_DRIVER)
    except DamagedCheckpointError as error:
        raise UserError(
            f"{checkpoint_folder(run, step)} is damaged: {error}; choose later or earlier --steps"
        ) from None


def _build_decode(environment: Environment, spec: RLJobSpec, groups: Sequence[Group]) -> Decode | None:
    """Return what shows the tokens of conversations in the log; None if there are none."""
    if not any(episode.messages for group in groups for episode in group.episodes):
        return None
    tokenizer = load_tokenizer(environment.model, spec.model)
    return ChatTemplate(tokenizer, spec.agent.tool_format, spec.data.chat_template_arguments).decode


def build_ledger(
    run_dir: Path, job: RLJob, algorithm: AlgorithmCode, first: int, board: StatusBoard, decode: Decode | None
) -> Ledger:
    now, history, prometheus = time.monotonic(), History(step=first - 1), PrometheusMetrics()
    return Ledger(
        run_dir,
        history,
        Reports(board, Trackers(), prometheus, decode),
        RunClock(run_dir, history, board, prometheus, RoleClock(now), PhaseClock(now)),
        algorithm=algorithm,
        schedule=job.spec.schedule,
        spec=job.spec,
        disk=RunDisk(run_dir),
    )


async def replay(environment: Environment, settings: Settings) -> None:
    model_settings = load_model_settings(environment.job, environment.model)
    job, run = model_settings.job, Path(settings.run)
    read = partial(read_step, run, job.spec)
    first = await asyncio.to_thread(read, settings.steps[0])
    checkpoint = find_checkpoint(run, settings.checkpoint)
    algorithm, board = build_algorithm(job.spec), StatusBoard()
    truncate_to_history(environment.run_dir, History())  # an earlier attempt may have ended in between
    async with AsyncExitStack() as stack:
        server = StatusServer(board, PrometheusMetrics().render)  # its probes are those of the head
        await server.start(environment.address)
        stack.push_async_callback(server.close)
        ray_head = RayHead(environment.address, head_store_bytes(job, model_settings.context_length))
        stack.push_async_callback(ray_head.close)
        await ray_head.start()
        await run_with_watcher(asyncio.to_thread(connect), ray_head.watch())
        stack.push_async_callback(asyncio.to_thread, disconnect)
        ledger = build_ledger(
            environment.run_dir, job, algorithm, settings.steps[0], board, _build_decode(environment, job.spec, first)
        )
        stack.push_async_callback(ledger.trajectories.close)
        trainer = await TrainerGroup.start(
            job,
            model=environment.model,
            # All ranks are on this machine, and read the checkpoint where it is.
            run=RunFolder(environment.run_dir, read_run_id(environment.run_dir), ""),
            generation=_GENERATION,
            checkpoint=checkpoint,
            report=board.waits_for,
        )
        stack.push_async_callback(trainer.close)
        tokens = job.spec.trainer.micro_batch_tokens * job.spec.trainer.num_ranks
        updates = StepUpdates(job.spec.schedule, algorithm, trainer, ledger.clock.training, full_tokens=tokens)
        loop = ReplayLoop(trainer, updates, ledger, read)
        await run_with_watcher(run_with_watcher(loop.run(settings.steps), trainer.watch()), ray_head.watch())
