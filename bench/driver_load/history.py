"""What a checkpoint costs the driver, and the start from it, by the steps of the run: CPU time, without the ranks."""

from __future__ import annotations

import inspect
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from driver_load.episodes import Shape, build_job
from driver_load.step import Books
from rljob_api.run.folder import FILE_METRICS
from rljob_api.run.metrics import StepRecord, append_records
from rljob_trainer.history.run_state import (
    FILE_DRIVER,
    begin_checkpoint,
    complete_checkpoint,
    remove_old_checkpoints,
    resume,
)


async def measure_history(shape: Shape, num_steps: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        books = Books(build_job(shape), Path(folder))
        history = books.ledger.history
        history.step = 0
        for step in range(1, num_steps + 1):
            _record_step(Path(folder), books, step, shape)
        began = time.process_time()
        checkpoint = await begin_checkpoint(Path(folder), history, _save)
        written: Any = books.ledger.write_summary()
        if inspect.isawaitable(written):
            await written
        saved = time.process_time()
        complete_checkpoint(checkpoint, {})
        remove_old_checkpoints(Path(folder), keep=1)
        again = time.process_time()
        resumed, _ = resume(Path(folder))
        ended = time.process_time()
        assert resumed.step == num_steps
        await books.ledger.trajectories.close()
        return {
            "checkpoint_ms": (saved - began) * 1e3,
            "start_ms": (ended - again) * 1e3,
            "driver_json_bytes": os.stat(checkpoint / FILE_DRIVER).st_size,
        }


async def _save(folder: Path) -> None:
    """Stands for the ranks, whose time the step does not change."""


def _record_step(folder: Path, books: Books, step: int, shape: Shape) -> None:
    """Continue the history by a step, as the ledger does."""
    books.ledger.history.step = step
    record = StepRecord(step=step, reward=0.5, phase_seconds={"update": 1.0}, prompts=list(range(shape.groups)))
    append_records(folder / FILE_METRICS, [record])
