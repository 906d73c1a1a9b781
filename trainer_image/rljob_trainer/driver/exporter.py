"""Which steps of a trainer group become models in Hugging Face format, by spec.checkpoint.exportPolicy.

    every: training waits for the model of a step --> its checkpoint is COMPLETE --> exports/step-000010
    last, best: after the last checkpoint --> export

Invariants: an export is of a complete checkpoint. After a stop or a crash, one that is missing is written when the next
group starts, which has the weights of the newest checkpoint, or at the end.
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rljob_api.errors import UserError
from rljob_api.manifest.job_sections import ExportedSteps
from rljob_api.run.folder import EXPORT, checkpoint_folder, export_folder
from rljob_api.run.summaries import BestStep
from rljob_trainer.concurrency import run_in_thread
from rljob_trainer.driver.ports import Trainer
from rljob_trainer.history.disk import RunDisk
from rljob_trainer.history.exports import place_export, remove_exports, write_partial
from rljob_trainer.history.run_state import FILE_DRIVER, History, checkpoint_exists, open_checkpoint
from rljob_trainer.run_folder.file_facts import Checkpoint, DamagedCheckpointError

log = logging.getLogger(__name__)
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
