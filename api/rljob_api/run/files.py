"""The files of a run that the head serves to readers, under RUN_ROUTE; without a head, a reader Pod does."""

import re
from pathlib import Path, PurePosixPath

from rljob_api.errors import UserError
from rljob_api.run.base import Count, Record
from rljob_api.run.folder import (
    CHECKPOINTS,
    EXPORT,
    EXPORTS,
    FILE_BEST,
    FILE_DRIVER_SUMMARY,
    FILE_JOB,
    FILE_METRICS,
    TRAJECTORIES,
    checkpoint_folder,
    complete_checkpoints,
    current_export,
    list_trajectory_files,
    parse_trajectory_file,
)
from rljob_api.run.summaries import read_best, read_driver_summary

PARAMETER_STEP = "step"
"""Query parameter of a list of the files of a model: a step, last or best."""
_STEP = r"step-\d{6,}"
_MODEL_FOLDER = rf"({EXPORT}|{EXPORTS}/{_STEP}|{CHECKPOINTS}/{_STEP})"
_MODEL_FILE = re.compile(rf"{_MODEL_FOLDER}(/(?!\.\.?(/|$))[\w.\-]+)+")
_NAMES = (FILE_METRICS, FILE_DRIVER_SUMMARY, FILE_BEST)


class RunFile(Record):
    """A file that may be read. Its size and time say whether it has changed."""

    name: str
    """Its path in the run's folder; `job.yaml` is the job as the head has it."""
    num_bytes: int
    modified: int
    """Nanoseconds since 1970."""


class ModelFiles(Record):
    """The model of a step: an export, or else a checkpoint."""

    step: Count
    folder: str
    """Below the run's folder."""
    files: list[RunFile]

    @property
    def is_export(self) -> bool:
        """Whether it is in Hugging Face format."""
        return not self.folder.startswith(f"{CHECKPOINTS}/")


def find_model(run_dir: Path, name: str) -> ModelFiles:
    """Return the files of a step: its number, last or best. Raise UserError, to follow the step, if there are none."""
    known = complete_checkpoints(run_dir)
    summary = read_driver_summary(run_dir)
    exported = summary.export_step if summary and summary.export and Path(summary.export).name == EXPORT else None
    if name == "best":
        step = read_best_step(run_dir)
    elif name == "last":
        step = next(reversed(known), exported or 0)
    else:
        step = int(name)
    if step == exported and (run_dir / EXPORT).is_dir():
        folder: Path | None = run_dir / EXPORT
    else:
        folder = current_export(run_dir, step) or (checkpoint_folder(run_dir, step) if step in known else None)
    if folder is None:
        raise UserError(f"the run has no checkpoint of step {step}; it has {', '.join(map(str, known)) or 'none'}")
    paths = {path.relative_to(run_dir).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return ModelFiles(step=step, folder=folder.relative_to(run_dir).as_posix(), files=describe_files(paths))


def read_best_step(run_dir: Path) -> int:
    """Return the step of the best model. Raise UserError, to follow the run, if it is of none."""
    if (best := read_best(run_dir)) is None:
        raise UserError("the run has no best.json: set evaluation.best in the job, or name a step")
    if not best.step:
        raise UserError("the best model of the run is that before training: no step was better; name a step")
    return best.step


def is_model_folder(name: str) -> bool:
    """Whether a name is that of the folder of a checkpoint or of an export."""
    return re.fullmatch(_MODEL_FOLDER, name) is not None


def is_model_file(name: str) -> bool:
    """Whether a name is that of a file of a checkpoint or of an export, and leads nowhere else."""
    return _MODEL_FILE.fullmatch(name) is not None


def list_run_files(run_dir: Path, job_file: Path) -> dict[str, Path]:
    """Return the paths of what reports read, by name. Files that do not exist are among them."""
    log = {f"{TRAJECTORIES}/{file.path.name}": file.path for file in list_trajectory_files(run_dir / TRAJECTORIES)}
    return {FILE_JOB: job_file} | {name: run_dir / name for name in _NAMES} | log


def is_run_file(name: str) -> bool:
    """Whether a name is one of those that a head serves: what a head says decides on no other path."""
    path = PurePosixPath(name)
    if str(path) != name or len(path.parts) != 2:
        return name in (FILE_JOB, *_NAMES)
    return path.parts[0] == TRAJECTORIES and parse_trajectory_file(Path(name)) is not None


def describe_files(paths: dict[str, Path]) -> list[RunFile]:
    """Return the files that exist."""
    found = []
    for name, path in paths.items():
        try:
            state = path.stat()
        except OSError:
            continue
        found.append(RunFile(name=name, num_bytes=state.st_size, modified=state.st_mtime_ns))
    return found
