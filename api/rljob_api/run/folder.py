"""The names of the files and folders of a run. Invariant: a checkpoint counts once it has FILE_COMPLETE, and until its
folder gets DAMAGED_PREFIX."""

import re
from pathlib import Path
from typing import NamedTuple

from rljob_api.wire.base import Lane

FILE_JOB = "job.yaml"
FILE_METRICS = "metrics.jsonl"
FILE_DRIVER_SUMMARY = "driver-summary.json"
FILE_SUMMARY = "summary.json"
FILE_BEST = "best.json"
FILE_REPORT = "report.html"
FILE_SESSIONS = "sessions.json"
FILE_SERVICE = "service.json"
"""Settings and keys of a training service, whose folder it is."""
CHECKPOINTS = "checkpoints"
FILE_COMPLETE = "COMPLETE"
FILE_DAMAGED = "DAMAGED"
"""Says why a checkpoint is damaged."""
DAMAGED_PREFIX = "damaged-"
"""Begins the name of its folder."""
EXPORT = "export"
EXPORTS = "exports"
TRAJECTORIES = "trajectories"
FILE_EVALUATION = "evaluation.json"
"""The results of `rljob evaluate`, next to the folders of its runs."""
_STEP_NAME = re.compile(r"step-\d{6,}")
_TRAJECTORY_NAME = re.compile(r"step-(\d+)\.(train|eval)\.parquet")


class TrajectoryFile(NamedTuple):
    """One file of the trajectory log. Files sort by age."""

    step: int
    lane: str
    path: Path


def trajectory_file(run_dir: Path, step: int, lane: Lane) -> Path:
    return run_dir / TRAJECTORIES / f"step-{step:06d}.{lane}.parquet"


def list_trajectory_files(folder: Path) -> list[TrajectoryFile]:
    """Return the complete files of a trajectory log, oldest first."""
    return sorted(file for path in folder.glob("step-*.parquet") if (file := parse_trajectory_file(path)))


def parse_trajectory_file(path: Path) -> TrajectoryFile | None:
    """Return None if the name is not that of a complete file."""
    match = _TRAJECTORY_NAME.fullmatch(path.name)
    return None if match is None else TrajectoryFile(int(match[1]), match[2], path)


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    return run_dir / CHECKPOINTS / f"step-{step:06d}"


def export_folder(run_dir: Path, step: int) -> Path:
    """Return where the model of a checkpoint is exported to, unlike EXPORT, which a run writes at its end."""
    return run_dir / EXPORTS / f"step-{step:06d}"


def current_export(run_dir: Path, step: int) -> Path | None:
    """Return the export of a step, if it is of the checkpoint that the run has: after a damaged one, a step is trained
    again."""
    folder, complete = export_folder(run_dir, step), checkpoint_folder(run_dir, step) / FILE_COMPLETE
    if not folder.is_dir():
        return None
    is_current = not complete.is_file() or complete.stat().st_mtime <= folder.stat().st_mtime
    return folder if is_current else None


def list_exports(run_dir: Path) -> dict[int, Path]:
    """Return the folders of EXPORTS by step, oldest first."""
    found = (path for path in (run_dir / EXPORTS).glob("step-*") if _STEP_NAME.fullmatch(path.name))
    return dict(sorted((int(path.name.removeprefix("step-")), path) for path in found))


def complete_checkpoints(run_dir: Path) -> dict[int, Path]:
    """Return the folders of complete checkpoints by step, oldest first: names of 7 digits sort differently."""
    folders = (file.parent for file in (run_dir / CHECKPOINTS).glob(f"step-*/{FILE_COMPLETE}"))
    return dict(sorted((int(folder.name.removeprefix("step-")), folder) for folder in folders))


def last_checkpoint(run_dir: Path) -> int | None:
    """Return the step of the newest complete checkpoint; None without one."""
    return next(reversed(complete_checkpoints(run_dir)), None)


def damaged_checkpoints(run_dir: Path) -> dict[str, str]:
    """Return why each damaged checkpoint is, by the name of its folder."""
    found = sorted((run_dir / CHECKPOINTS).glob(f"{DAMAGED_PREFIX}step-*/{FILE_DAMAGED}"))
    return {file.parent.name: file.read_text(errors="replace").strip() for file in found}
