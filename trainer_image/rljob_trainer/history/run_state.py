"""The files that make a run resumable: checkpoints, driver.json, and histories truncated to them.

Owns the order of writing: driver.json, trainer's folder, COMPLETE, which lists the files with their hashes. Training
may continue in between. A damaged checkpoint is set aside:

    open_checkpoint --> damaged --> DAMAGED says why --> renamed to damaged-step-000010 --> the one before is opened

The ranks compare their own files. Invariants: metrics.jsonl and trajectories/ hold one history, in which each prompt
was trained on exactly once, whatever died, and whichever checkpoint is damaged. A checkpoint that is set aside is kept
for the user and never counts again; a crash in between leaves it as it was.

Also places the models in Hugging Face format, EXPORT, and one for a step in EXPORTS: a partial folder, the removal of
what it replaces, its own name. A folder under its own name is whole, until it no longer has the name.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Awaitable, Callable, Container, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from rljob_api.errors import UserError
from rljob_api.run.folder import (
    CHECKPOINTS,
    DAMAGED_PREFIX,
    FILE_BEST,
    FILE_COMPLETE,
    FILE_DAMAGED,
    FILE_DRIVER_SUMMARY,
    FILE_METRICS,
    TRAJECTORIES,
    checkpoint_folder,
    complete_checkpoints,
    damaged_checkpoints,
    last_checkpoint,
    list_exports,
    list_trajectory_files,
)
from rljob_api.run.summaries import BestStep, format_summary
from rljob_trainer.concurrency import run_in_thread
from rljob_trainer.history.disk import DiskError, disk_errors, sync, write_durably
from rljob_trainer.run_folder.client import EXPORT_PARTIAL
from rljob_trainer.run_folder.file_facts import (
    Checkpoint,
    DamagedCheckpointError,
    FileFacts,
    describe_file,
    verify_files,
    verify_sizes,
)

_REMOVED = ".export.removed"


async def write_partial(run_dir: Path, write: Callable[[Path], Awaitable[float | None]]) -> float | None:
    """Let `write` fill a new folder, which `place_export` names. Return what `write` returns."""
    partial = run_dir / EXPORT_PARTIAL
    with disk_errors(partial):
        await run_in_thread(shutil.rmtree, partial, ignore_errors=True)
        partial.mkdir()
        return await write(partial)


def place_export(run_dir: Path, folder: Path) -> None:
    """Replace the export `folder` by what `write_partial` has written."""
    partial = run_dir / EXPORT_PARTIAL
    with disk_errors(folder):
        remove_export(run_dir, folder)
        folder.parent.mkdir(exist_ok=True)
        os.utime(partial)  # later than its checkpoint: `rljob evaluate` compares them
        partial.rename(folder)


def remove_export(run_dir: Path, folder: Path) -> None:
    """Remove an export, if it exists: first its name."""
    removed = run_dir / _REMOVED
    shutil.rmtree(removed, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        folder.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def remove_exports(run_dir: Path, is_gone: Callable[[int], bool]) -> None:
    """Remove the exports of the steps that are gone."""
    for step, folder in list_exports(run_dir).items():
        if is_gone(step):
            remove_export(run_dir, folder)


log = logging.getLogger(__name__)

FILE_DRIVER = "driver.json"


class History(BaseModel):
    """The driver's state in a checkpoint, from which it resumes exactly. It is as large after 5,000 steps as after ten:
    what each step adds is its line in metrics.jsonl. A curriculum adds a byte or less for each prompt.

    The seeds of sampling and data order depend only on schedule.seed and the step, so no generator's state is needed.
    """

    # Constants: a mean may be infinite, and a null in its place would not validate.
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    step: int = 0
    """Completed steps; also the version of the weights."""
    lane: dict[str, Any] = {}
    """Groups in flight and the order of prompts (driver.train_lane.LaneState); empty before the first step."""
    seed: int = 0
    metrics_bytes: int = 0
    """Length of metrics.jsonl at the checkpoint."""
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    eval_before: dict[str, float | None] | None = None
    eval_after: dict[str, float | None] | None = None
    evaluated_at: dict[str, int] = {}
    """Step of the last evaluation of each set, by its name."""
    accuracies: dict[str, float] = {}
    """Accuracy of these evaluations, where it is known."""
    best: BestStep | None = None
    """The best step by spec.evaluation.best."""
    phase_seconds: dict[str, float] = {}
    trained_seconds: float = 0.0
    """What run_time had for the steps up to this one."""
    samples_trained: int = 0
    rewards_served: int = 0
    invalid_by_reason: dict[str, int] = {}
    steps_without_valid: int = 0
    steps_without_advantage: int = 0
    """Consecutive steps up to the last one (driver.learning)."""
    skipped_updates: int = 0
    """Consecutive updates up to the last one that changed nothing, because the gradient was not finite."""
    head_job_uid: str = ""
    """UID of the Kubernetes Job of the head that wrote the checkpoint."""
    restarts: dict[str, int] = {"trainer": 0}
    """Within that Job."""
    answered: list[str] = []
    """What the job depends on and has answered (rljob_trainer.outages)."""


def checkpoint_exists(run_dir: Path, step: int) -> bool:
    return (checkpoint_folder(run_dir, step) / FILE_COMPLETE).exists()


def resume(run_dir: Path) -> tuple[History, Checkpoint | None]:
    """Return the newest intact checkpoint and its history, or a new history. Truncate all files to it. A damaged
    checkpoint is set aside. Raise UserError if there were only damaged ones."""
    history, checkpoint = History(), None
    while checkpoint is None and (step := last_checkpoint(run_dir)) is not None:
        folder = checkpoint_folder(run_dir, step)
        try:
            checkpoint = open_checkpoint(folder, FILE_DRIVER)
            history = _read_history(folder)
        except DamagedCheckpointError as error:
            set_aside(run_dir, error)
    if checkpoint is None:
        check_any_left(run_dir)
    truncate_to_history(run_dir, history)
    return history, checkpoint


def _read_history(folder: Path) -> History:
    try:
        return History.model_validate_json((folder / FILE_DRIVER).read_text())
    except ValueError as error:  # the file is as it was written
        raise UserError(
            f"{folder / FILE_DRIVER}: cannot read it ({error}); another version of RLJob wrote it: use that version, "
            f"or remove {folder} to use the previous checkpoint"
        ) from error


def truncate_to_history(run_dir: Path, history: History) -> None:
    for folder in (run_dir / CHECKPOINTS).glob("step-*"):
        if not (folder / FILE_COMPLETE).exists():
            shutil.rmtree(folder)
    last = {"train": history.step, "eval": max(history.evaluated_at.values(), default=-1)}
    remove_exports(run_dir, lambda step: step > history.step)
    for file in list_trajectory_files(run_dir / TRAJECTORIES):
        if file.step > last[file.lane]:
            file.path.unlink()
    for partial in (run_dir / TRAJECTORIES).glob(".step-*.partial"):
        partial.unlink()
    metrics = run_dir / FILE_METRICS
    if metrics.exists():
        os.truncate(metrics, min(history.metrics_bytes, metrics.stat().st_size))
    if history.step == 0:
        (run_dir / FILE_DRIVER_SUMMARY).unlink(missing_ok=True)


async def begin_checkpoint(run_dir: Path, history: History, save_trainer: Callable[[Path], Awaitable[None]]) -> Path:
    """Write the driver's state of `history` to a new folder, and begin with the trainer's. Return the folder, which
    counts once `complete_checkpoint` was called."""
    folder = checkpoint_folder(run_dir, history.step)
    with disk_errors(folder):
        await run_in_thread(_begin_folder, run_dir, folder, history)  # a volume may take seconds to flush a file
        await save_trainer(folder)
    return folder


def _begin_folder(run_dir: Path, folder: Path, history: History) -> None:
    if folder.exists():
        (folder / FILE_COMPLETE).unlink(missing_ok=True)
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    metrics = run_dir / FILE_METRICS
    metrics.touch()
    sync(metrics)
    write_durably(folder / FILE_DRIVER, history.model_dump_json(indent=1))


def complete_checkpoint(folder: Path, files: Mapping[str, FileFacts]) -> None:
    """Make a checkpoint count whose files are all written; `files`: the trainer's, by path below the folder."""
    with disk_errors(folder):
        write_complete(folder, {FILE_DRIVER: describe_file(folder, FILE_DRIVER), **files})


def remove_old_checkpoints(run_dir: Path, *, keep: int, others: Container[int] = ()) -> None:
    """Remove all but the newest `keep`, and those of the steps `others`."""
    for step, old in list(complete_checkpoints(run_dir).items())[:-keep]:
        if step in others:
            continue
        (old / FILE_COMPLETE).unlink()  # first: a half-removed checkpoint must not look complete
        shutil.rmtree(old)


def check_disk_space(
    run_dir: Path, model: Path, *, keep: int, checkpoint_bytes: Callable[[int], int], num_exports: int
) -> None:
    """Raise UserError if `keep` checkpoints and the exports do not fit, and DiskError if the run has some already: a
    volume that once had the room is full. `checkpoint_bytes`: the size of one by that of the model, in parameters. The
    size of a model that is not in a local folder is unknown."""
    num_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors")) if model.is_dir() else 0
    # Nearly all models are stored with 2 bytes per parameter.
    checkpoint = checkpoint_bytes(num_bytes // 2)
    existing = len(complete_checkpoints(run_dir))
    # A next export is written before an older one goes. Besides, the published weights.
    missing = max(min(1, num_exports), num_exports - len(list_exports(run_dir)))
    needed = checkpoint * max(1, keep + 1 - existing) + (missing + 1) * num_bytes
    free = shutil.disk_usage(run_dir).free
    if free < needed:
        problem = (
            f"{run_dir}: {free / 2**30:.1f} GiB free, but {keep} checkpoints (one more while writing) and "
            f"exports need about {needed / 2**30:.1f} GiB"
        )
        if existing:
            raise DiskError(problem)
        raise UserError(f"{problem}; free some space, or lower spec.checkpoint.keep")


def name_checkpoint(run_dir: Path, best: BestStep) -> BestStep:
    """Return `best` with its checkpoint, if that is complete."""
    folder = checkpoint_folder(run_dir, best.step)
    found = str(folder.relative_to(run_dir)) if checkpoint_exists(run_dir, best.step) else None
    return best.model_copy(update={"checkpoint": found})


def read_best(run_dir: Path) -> BestStep | None:
    """Return what best.json names; None without a readable one."""
    try:
        return BestStep.model_validate_json((run_dir / FILE_BEST).read_bytes())
    except (OSError, ValueError):
        return None


def write_best(run_dir: Path, best: BestStep | None) -> None:
    """Write best.json, or remove one of steps that are no longer in the history."""
    path = run_dir / FILE_BEST
    with disk_errors(path):
        if best is None:
            path.unlink(missing_ok=True)
        else:
            write_durably(path, format_summary(name_checkpoint(run_dir, best)))


class _Complete(BaseModel):
    """The content of COMPLETE."""

    model_config = ConfigDict(extra="forbid", strict=True)

    files: dict[str, FileFacts]
    """All other files of the checkpoint, by path below its folder."""
    hash: str
    """The hash of `files`."""

    @classmethod
    def of(cls, files: Mapping[str, FileFacts]) -> _Complete:
        listed = {name: facts.model_dump() for name, facts in files.items()}
        return cls(files=dict(files), hash=xxhash.xxh3_128(json.dumps(listed).encode()).hexdigest())


def write_complete(folder: Path, files: Mapping[str, FileFacts]) -> None:
    """`files`: all files of the checkpoint, by path below the folder."""
    write_durably(folder / FILE_COMPLETE, _Complete.of(files).model_dump_json(indent=1))


def open_checkpoint(folder: Path, *names: str) -> Checkpoint:
    """Return a complete checkpoint whose files exist with their sizes, and whose files `names` are as they were
    written. Raise DamagedCheckpointError."""
    checkpoint = Checkpoint(folder, _read_complete(folder / FILE_COMPLETE))
    verify_sizes(folder, checkpoint.files)
    verify_files(folder, checkpoint.files, names)
    return checkpoint


def _read_complete(path: Path) -> dict[str, FileFacts]:
    try:
        complete = _Complete.model_validate_json(path.read_bytes())
    except ValidationError:
        raise DamagedCheckpointError(f"{path} is not readable") from None
    if complete != _Complete.of(complete.files):
        raise DamagedCheckpointError(f"{path} does not have its own hash")
    return complete.files


def set_aside(run_dir: Path, error: DamagedCheckpointError) -> None:
    """Let the newest checkpoint no longer count. It is the one from which a run resumes."""
    damaged = _newest(run_dir)
    assert damaged is not None, "a run without a checkpoint has found it damaged"
    write_durably(damaged / FILE_DAMAGED, f"{error}\n")
    names = (f"{DAMAGED_PREFIX}{damaged.name}" + f"-{number}" * (number > 1) for number in count(1))
    kept = next(path for path in map(damaged.with_name, names) if not path.exists())
    damaged.rename(kept)
    sync(kept.parent)
    before = _newest(run_dir)
    then = "there is no other checkpoint" if before is None else f"the job resumes from {before.name}"
    log.warning("%s is damaged: %s; it is kept as %s, and %s", damaged.name, error, kept.name, then)


def _newest(run_dir: Path) -> Path | None:
    step = last_checkpoint(run_dir)
    return None if step is None else checkpoint_folder(run_dir, step)


def check_any_left(run_dir: Path) -> None:
    """Raise UserError if there are only damaged checkpoints: a job does not lose all its steps without a word."""
    if damaged := damaged_checkpoints(run_dir):
        found = "; ".join(f"{name}: {why}" for name, why in damaged.items())
        raise UserError(
            f"{run_dir / CHECKPOINTS}: no checkpoint is intact ({found}); restore one under its name without "
            f"{DAMAGED_PREFIX!r}, or remove these folders to train from step 0"
        )
