"""The files that make a run resumable: checkpoints, driver.json, and histories truncated to them.

Owns the order of writing: driver.json, trainer's folder, COMPLETE. Training may continue in between. Invariant:
metrics.jsonl and trajectories/ hold one history, in which each prompt was trained on exactly once, whatever died, and
whichever checkpoint is damaged (history.damage).
"""

import os
import shutil
from collections.abc import Awaitable, Callable, Container, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from rljob_api.errors import UserError
from rljob_api.run.folder import (
    CHECKPOINTS,
    FILE_BEST,
    FILE_COMPLETE,
    FILE_DRIVER_SUMMARY,
    FILE_METRICS,
    TRAJECTORIES,
    checkpoint_folder,
    complete_checkpoints,
    last_checkpoint,
    list_exports,
    list_trajectory_files,
)
from rljob_api.run.summaries import BestStep, format_summary
from rljob_trainer.concurrency import run_in_thread
from rljob_trainer.history.damage import check_any_left, open_checkpoint, set_aside, write_complete
from rljob_trainer.history.disk import DiskError, disk_errors, sync, write_durably
from rljob_trainer.history.exports import remove_exports
from rljob_trainer.run_folder.file_facts import Checkpoint, DamagedCheckpointError, FileFacts, describe_file

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
    """What the job depends on and has answered (outages.registry)."""


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
