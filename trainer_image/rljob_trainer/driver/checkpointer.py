"""Writes the checkpoints of one trainer group, one at a time.

    save: its export, if each has one --> driver.json, the ranks' copies --> training continues
                                     '--> the ranks write --> COMPLETE --> the copy, if there is one
                                          --> older ones are removed, the export is placed

If the disk has no room, the checkpoint is owed: the next one is saved instead, at once, and training waits until it is
written. Invariant: a folder is COMPLETE once every rank has written the state of its step; until then, the older ones
stay. With a copy in object storage, they stay until that has the new one.

`Exporter`: which steps become models in Hugging Face format, by spec.checkpoint.exportPolicy.

    every: training waits for the model of a step --> its checkpoint is COMPLETE --> exports/step-000010
    last, best: after the last checkpoint --> export

Invariants: an export is of a complete checkpoint. After a stop or a crash, one that is missing is written when the next
group starts, which has the weights of the newest checkpoint, or at the end.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rljob_api.errors import UserError
from rljob_api.manifest.job_sections import ExportedSteps
from rljob_api.run.folder import EXPORT, checkpoint_folder, export_folder, last_checkpoint
from rljob_api.run.summaries import BestStep
from rljob_trainer.concurrency import end_tasks, run_in_thread
from rljob_trainer.driver.ports import Trainer
from rljob_trainer.history.disk import DiskError, RunDisk, disk_errors
from rljob_trainer.history.run_state import (
    FILE_DRIVER,
    History,
    begin_checkpoint,
    checkpoint_exists,
    complete_checkpoint,
    open_checkpoint,
    place_export,
    remove_exports,
    remove_old_checkpoints,
    write_partial,
)
from rljob_trainer.mirror.mirror import Mirror
from rljob_trainer.run_folder.file_facts import Checkpoint, DamagedCheckpointError

_FIELD = "spec.checkpoint.exportPolicy"
_REMEDY = "set it to last to export the last step"


@dataclass
class Exporter:
    """`steps`: spec.checkpoint.exportPolicy. `record` gets the export that the run ends with, its step, and how much of
    the adapters' update it has; None if this group has not written it, or without adapters."""

    run_dir: Path
    trainer: Trainer
    steps: ExportedSteps
    tokenizer_source: str
    disk: RunDisk
    record: Callable[[Path, int, float | None], None]
    _merged_share: float | None = None
    """That of the model that `prepare` wrote."""

    async def prepare(self) -> None:
        """A checkpoint of the trainer's weights begins: write their model, if each checkpoint has one."""
        if self.steps == "every":
            await self._write(None)

    async def place(self, step: int) -> None:
        """The checkpoint of a step is complete: place what `prepare` wrote, and remove the models whose checkpoints are
        removed."""
        if self.steps == "every":
            await self._place(export_folder(self.run_dir, step))
            await run_in_thread(remove_exports, self.run_dir, lambda each: not checkpoint_exists(self.run_dir, each))

    async def restore(self, step: int) -> None:
        """The trainer starts with the weights of a step: write its model, if a crash has prevented it."""
        folder = export_folder(self.run_dir, step)
        if self.steps == "every" and checkpoint_exists(self.run_dir, step) and not folder.is_dir():
            await self.prepare()
            await self.place(step)

    async def finish(self, history: History, give_turn: Callable[[], Awaitable[None]]) -> None:
        """No step follows: write and record the model that the run ends with. `give_turn`: gives the trainer
        the devices. Raise UserError if the checkpoint of the best step is missing or damaged."""
        if self.steps == "never":
            return
        if self.steps == "every":
            if (folder := export_folder(self.run_dir, history.step)).is_dir():
                self.record(folder, history.step, self._merged_share)
            return
        step = history.step if self.steps == "last" else _choose(history.best)
        if step is None:
            return
        await give_turn()  # it gathers whole parameters
        try:
            await self._write(None if step == history.step else await run_in_thread(self._open, step))
        except DamagedCheckpointError as error:
            problem = f"the checkpoint of the best step, {step}, is damaged: {error}"
            raise UserError(f"{_FIELD}: {problem}; {_REMEDY}") from None
        await self._place(self.run_dir / EXPORT)
        self.record(self.run_dir / EXPORT, step, self._merged_share)

    def _open(self, step: int) -> Checkpoint:
        if not checkpoint_exists(self.run_dir, step):
            raise UserError(f"{_FIELD}: the best step, {step}, no longer has a checkpoint; {_REMEDY}")
        return open_checkpoint(checkpoint_folder(self.run_dir, step), FILE_DRIVER)

    async def _write(self, checkpoint: Checkpoint | None) -> None:
        write = partial(self.trainer.export, tokenizer_source=self.tokenizer_source, checkpoint=checkpoint)
        work = partial(write_partial, self.run_dir, write)
        self._merged_share = await self.disk.run(self.run_dir / EXPORT, work)

    async def _place(self, folder: Path) -> None:
        await self.disk.write(folder, partial(place_export, self.run_dir, folder))


def _choose(best: BestStep | None) -> int | None:
    """Return the best step; None if it has no weights of this run."""
    if best is not None and best.step > 0:
        return best.step
    why = "no evaluation has its figure" if best is None else "the best model is that before the first step, spec.model"
    log.warning("%s: nothing is exported: %s", _FIELD, why)
    return None


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointSeconds:
    """What one checkpoint cost."""

    step: int
    wait: float
    """For which training waited: for the checkpoint before, the export, and the copies or the write."""
    write: float
    """From the ranks' copies to COMPLETE, and into object storage, next to training."""
    export: float = 0.0
    """The part of `wait` for the export."""


@dataclass
class Checkpointer:
    run_dir: Path
    trainer: Trainer
    keep: int
    record: Callable[[CheckpointSeconds], None]
    """Gets what a complete checkpoint cost."""
    exporter: Exporter
    disk: RunDisk
    list_kept: Callable[[], set[int]] = set
    """Returns the steps whose checkpoints stay besides the newest `keep`: the best one, and the one that may become
    it."""
    copies: Mirror | None = None
    """Where checkpoints must be, too."""
    is_owed: bool = False
    """Whether the disk had no room for the last one."""
    _writing: asyncio.Task[None] | None = None
    _step: int = 0

    async def save(self, history: History, *, exports: bool = True) -> None:
        """Begin a checkpoint of this step, once the one before is complete. Training may continue when this returns.
        Without `exports`, the next group writes its export."""
        started_at = time.monotonic()
        await self.wait()
        waited_at = time.monotonic()
        if exports:
            await self.exporter.prepare()
        export_seconds = time.monotonic() - waited_at if exports else None
        self._step, path = history.step, checkpoint_folder(self.run_dir, history.step)

        async def begin() -> asyncio.Task[None]:
            kept = self.list_kept()  # as the history of this checkpoint has them
            folder = await begin_checkpoint(self.run_dir, history, self.trainer.save)
            write = self._write(folder, history.step, kept, started_at, time.monotonic(), export_seconds)
            return asyncio.create_task(write)

        async def write() -> None:
            await (await begin())

        if not self.is_owed:
            self._writing = await self.disk.run(path, begin)
            return
        await self.disk.run(path, write)
        self.is_owed = False

    async def wait(self) -> None:
        """Wait until no checkpoint is being written. Raise why the last one failed, but for lack of room."""
        if self._writing is not None:
            await asyncio.wait((self._writing,))  # a cancelled wait leaves the write as it is
            self.check()

    def check(self) -> None:
        """Raise why the last checkpoint failed, if it has. One without room is owed."""
        if self._writing is not None and self._writing.done():
            writing, self._writing = self._writing, None
            try:
                writing.result()
            except DiskError as error:
                self.disk.record_failure(error)
                self.is_owed = True

    def exists(self, step: int) -> bool:
        """Whether a complete checkpoint has this step."""
        return checkpoint_exists(self.run_dir, step)

    @property
    def newest(self) -> int | None:
        """Step of the newest complete checkpoint; with copies, of the newest one there."""
        return last_checkpoint(self.run_dir) if self.copies is None else self.copies.newest

    @property
    def step(self) -> int | None:
        """Step of the checkpoint that is being written."""
        return None if self._writing is None else self._step

    async def close(self, seconds: float = 0.0) -> None:
        """Give the last checkpoint some time, before its group ends. A failure is only logged: it is not why."""
        if self._writing is not None:
            await asyncio.wait((self._writing,), timeout=seconds)
            await end_tasks(self._writing)
            self._writing = None

    async def _write(
        self,
        folder: Path,
        step: int,
        kept: set[int],
        started_at: float,
        copied_at: float,
        export_seconds: float | None,
    ) -> None:
        try:
            with disk_errors(folder):
                files = await self.trainer.saved()
            await run_in_thread(complete_checkpoint, folder, files)
            if self.copies is not None:
                await self.copies.save(step, keep=self.keep, others=kept | self.list_kept())
            others = kept | self.list_kept()
            await run_in_thread(remove_old_checkpoints, self.run_dir, keep=self.keep, others=others)
            if export_seconds is not None:
                await self.exporter.place(step)
        except BaseException as error:
            log.warning("the checkpoint of step %d is not complete: %s: %s", step, type(error).__name__, error)
            raise
        write = time.monotonic() - copied_at
        self.record(CheckpointSeconds(step, copied_at - started_at, write, export_seconds or 0.0))
