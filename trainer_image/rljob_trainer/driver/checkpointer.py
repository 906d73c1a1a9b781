"""Writes the checkpoints of one trainer group, one at a time.

    save: its export, if each has one --> driver.json, the ranks' copies --> training continues
                                     '--> the ranks write --> COMPLETE --> the copy, if there is one
                                          --> older ones are removed, the export is placed

If the disk has no room, the checkpoint is owed: the next one is saved instead, at once, and training waits until it is
written. Invariant: a folder is COMPLETE once every rank has written the state of its step; until then, the older ones
stay. With a copy in object storage, they stay until that has the new one.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rljob_api.run.folder import checkpoint_folder, last_checkpoint
from rljob_trainer.concurrency import end_tasks, run_in_thread
from rljob_trainer.driver.exporter import Exporter
from rljob_trainer.driver.ports import Trainer
from rljob_trainer.history.disk import DiskError, RunDisk, disk_errors
from rljob_trainer.history.run_state import (
    History,
    begin_checkpoint,
    checkpoint_exists,
    complete_checkpoint,
    remove_old_checkpoints,
)
from rljob_trainer.mirror.mirror import Mirror

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
