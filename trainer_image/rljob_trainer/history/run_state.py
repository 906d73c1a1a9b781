"""The files that make a run resumable: checkpoints, driver.json, and histories truncated to them.

Owns the order of writing: driver.json, trainer's folder, COMPLETE. Training may continue in between. Invariant:
metrics.jsonl and trajectories/ hold one history, in which each prompt was trained on exactly once, whatever died.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJobSpec
from rljob_api.wire.protocol import Lane
from rljob_trainer.history.versions import find_versions
from rljob_trainer.run_folder.location import EXPORT_PARTIAL

FILE_DRIVER = "driver.json"
FILE_COMPLETE = "COMPLETE"
FILE_METRICS = "metrics.jsonl"
FILE_SUMMARY = "driver-summary.json"
_TRAJECTORY_NAME = re.compile(r"step-(\d+)\.(train|eval)\.parquet")
_BYTES_PER_PARAMETER = 12
"""In a checkpoint: fp32 weights and two Adam moments."""


class History(BaseModel):
    """The driver's state in a checkpoint, from which it resumes exactly.

    The seeds of sampling and data order depend only on schedule.seed and the step, so no generator's state is needed.
    """

    # Constants: a log-prob may be infinite, and a null in its place would not validate.
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    step: int = 0
    """Completed steps; also the version of the weights."""
    lane: dict[str, Any] = {}
    """Groups in flight and the data cursor (driver.train_lane.LaneState); empty before the first step."""
    epoch: int = 0
    position: int = 0
    """The data cursor of a checkpoint without `lane`, by an older version."""
    seed: int = 0
    metrics_bytes: int = 0
    """Length of metrics.jsonl at the checkpoint."""
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    eval_before: dict[str, float] | None = None
    eval_after: dict[str, float] | None = None
    evaluated_at: int | None = None
    """Step of the last evaluation."""
    step_rewards: list[float | None] = []
    prompts_trained: list[list[int]] = []
    """[steps][prompts] Rows of the dataset."""
    phase_seconds: dict[str, float] = {}
    samples_trained: int = 0
    rewards_served: int = 0
    invalid_by_reason: dict[str, int] = {}
    pause_seconds: list[float] = []
    transfer_seconds: list[float] = []
    logprob_difference: list[float] = []
    steps_without_valid: int = 0
    steps_without_advantage: int = 0
    """Consecutive steps up to the last one (driver.learning)."""
    skipped_updates: int = 0
    """Consecutive updates up to the last one that changed nothing, because the gradient was not finite."""
    head_job_uid: str = ""
    """Of the Kubernetes Job of the head that wrote the checkpoint."""
    restarts: dict[str, int] = {"trainer": 0}
    """Within that Job."""


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:06d}"


class TrajectoryFile(NamedTuple):
    """One file of the trajectory log. Files sort by age."""

    step: int
    lane: str
    path: Path


def trajectory_file(run_dir: Path, step: int, lane: Lane) -> Path:
    return run_dir / "trajectories" / f"step-{step:06d}.{lane}.parquet"


def list_trajectory_files(run_dir: Path) -> list[TrajectoryFile]:
    """Return the complete files of the trajectory log, oldest first."""
    paths = (run_dir / "trajectories").glob("step-*.parquet")
    named = [(match, path) for path in paths if (match := _TRAJECTORY_NAME.fullmatch(path.name))]
    return sorted(TrajectoryFile(int(match[1]), match[2], path) for match, path in named)


def checkpoint_exists(run_dir: Path, step: int) -> bool:
    return (checkpoint_folder(run_dir, step) / FILE_COMPLETE).exists()


def _complete_checkpoints(run_dir: Path) -> list[Path]:
    """Return the folders of complete checkpoints, oldest first: by number, as names of 7 digits sort differently."""
    folders = (file.parent for file in (run_dir / "checkpoints").glob(f"step-*/{FILE_COMPLETE}"))
    return sorted(folders, key=lambda folder: int(folder.name.removeprefix("step-")))


def resume(run_dir: Path) -> tuple[History, Path | None]:
    """Return the newest complete checkpoint and its history, or a new history. Truncate all files to it."""
    folder = next(reversed(_complete_checkpoints(run_dir)), None)
    history = History()
    if folder is not None:
        try:
            history = History.model_validate_json((folder / FILE_DRIVER).read_text())
        except (OSError, ValueError) as error:
            raise UserError(
                f"{folder / FILE_DRIVER}: cannot read it ({error}); remove {folder} to use the previous checkpoint"
            ) from error
    truncate_to_history(run_dir, history)
    return history, folder


def truncate_to_history(run_dir: Path, history: History) -> None:
    for folder in (run_dir / "checkpoints").glob("step-*"):
        if not (folder / FILE_COMPLETE).exists():
            shutil.rmtree(folder)
    last = {"train": history.step, "eval": -1 if history.evaluated_at is None else history.evaluated_at}
    for file in list_trajectory_files(run_dir):
        if file.step > last[file.lane]:
            file.path.unlink()
    for partial in (run_dir / "trajectories").glob(".step-*.partial"):
        partial.unlink()
    metrics = run_dir / FILE_METRICS
    if metrics.exists():
        os.truncate(metrics, min(history.metrics_bytes, metrics.stat().st_size))
    if history.step == 0:
        (run_dir / FILE_SUMMARY).unlink(missing_ok=True)


async def begin_checkpoint(run_dir: Path, history: History, save_trainer: Callable[[Path], Awaitable[None]]) -> Path:
    """Write the driver's state of `history` to a new folder, and begin with the trainer's. Return the folder, which
    counts once `complete_checkpoint` was called."""
    folder = checkpoint_folder(run_dir, history.step)
    with disk_errors(folder):
        if folder.exists():
            (folder / FILE_COMPLETE).unlink(missing_ok=True)
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        metrics = run_dir / FILE_METRICS
        metrics.touch()
        _sync(metrics)
        history.metrics_bytes = metrics.stat().st_size
        write_durably(folder / FILE_DRIVER, history.model_dump_json(indent=1))
        await save_trainer(folder)
    return folder


def complete_checkpoint(run_dir: Path, folder: Path, *, keep: int) -> None:
    """Make a checkpoint count whose files are all written. Then remove all but the newest `keep`."""
    with disk_errors(folder):
        write_durably(folder / FILE_COMPLETE, "")
    for old in _complete_checkpoints(run_dir)[:-keep]:
        (old / FILE_COMPLETE).unlink()  # first: a half-removed checkpoint must not look complete
        shutil.rmtree(old)


async def export_model(run_dir: Path, write: Callable[[Path], Awaitable[None]]) -> Path:
    """Replace the export by what `write` puts into a new folder. Return the export, which is always complete."""
    folder, partial = run_dir / "export", run_dir / EXPORT_PARTIAL
    with disk_errors(folder):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        await write(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    return folder


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, text: str) -> None:
    """Write a file atomically: after a crash of the process or the node it is complete, or it does not exist."""
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(text, encoding="utf-8")
    rename_durably(temporary, path)


def rename_durably(temporary: Path, path: Path) -> None:
    """Flush a file to the disk and rename it, and flush the rename."""
    _sync(temporary)
    temporary.replace(path)
    _sync(path.parent)


@contextlib.contextmanager
def disk_errors(where: Path) -> Iterator[None]:
    """Raise UserError if the disk is full, here or in a remote process."""
    try:
        yield
    except Exception as error:
        if getattr(error, "errno", None) == errno.ENOSPC or os.strerror(errno.ENOSPC) in str(error):
            raise UserError(
                f"{where}: no space left on device: free disk space, or lower spec.checkpoint.keep; the job resumes "
                f"from the previous checkpoint"
            ) from error
        raise


def check_disk_space(run_dir: Path, model: Path, spec: RLJobSpec) -> None:
    """Raise UserError if the checkpoints do not fit. The size of a model that is not a local folder is unknown."""
    keep = spec.checkpoint.keep
    num_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors")) if model.is_dir() else 0
    # Nearly all models are stored with 2 bytes per parameter.
    checkpoint = spec.num_optimized_models * num_bytes // 2 * _BYTES_PER_PARAMETER
    existing = len(_complete_checkpoints(run_dir))
    needed = checkpoint * max(1, keep + 1 - existing) + 2 * num_bytes  # the export, and the published weights
    free = shutil.disk_usage(run_dir).free
    if free < needed:
        raise UserError(
            f"{run_dir}: {free / 2**30:.1f} GiB free, but {keep} checkpoints (one more while writing) and the "
            f"export need about {needed / 2**30:.1f} GiB; free some space, or lower spec.checkpoint.keep"
        )


def write_summary(
    run_dir: Path, history: History, *, weight_digests: dict[str, str], export: Path | None, model_commit: str | None
) -> None:
    """Write driver-summary.json, from which `rljob run` builds summary.json."""
    pauses, transfers = history.pause_seconds, history.transfer_seconds
    summary = history.model_dump(
        include={
            "accuracy_before", "accuracy_after", "eval_before", "eval_after", "step_rewards", "phase_seconds",
            "samples_trained", "prompts_trained", "rewards_served", "invalid_by_reason", "restarts",
            "logprob_difference",
        }
    )  # fmt: skip
    summary |= {
        "weight_digests": weight_digests,
        "export": str(export) if export else None,
        "versions": find_versions(),
        "model_commit": model_commit,
        "pause_seconds": sum(pauses) / len(pauses) if pauses else None,
        "transfer_seconds": sum(transfers) / len(transfers) if transfers else None,
    }
    with disk_errors(run_dir):
        write_durably(run_dir / FILE_SUMMARY, json.dumps(summary, indent=1))
