"""The model of another run that a run begins with (job://NAME@STEP), and model.json, which pins it."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from rljob_api.errors import UserError
from rljob_api.run.folder import EXPORT, current_export, list_exports
from rljob_api.run.summaries import read_best, read_driver_summary

FILE_PIN = "model.json"


class Pin(BaseModel):
    """Which model a run has begun with: the content of model.json."""

    model_config = ConfigDict(extra="forbid")

    source: str
    """As the job has it."""
    run: str
    """The other run's folder."""
    step: int


def read_pin(run_dir: Path) -> Pin | None:
    """Return which model a run has begun with; None if model.json is missing or not readable."""
    try:
        return Pin.model_validate_json((run_dir / FILE_PIN).read_bytes())
    except (OSError, ValidationError):
        return None


def find_exports(run_dir: Path) -> dict[int, Path]:
    """Return the models that a run has exported, by step, oldest first. A model of EXPORT counts once the run's summary
    has its step, and one of a step unless its checkpoint was written again since."""
    found = {step: path for step, path in list_exports(run_dir).items() if current_export(run_dir, step)}
    summary = read_driver_summary(run_dir)
    if summary and summary.export_step is not None and summary.export and Path(summary.export).name == EXPORT:
        folder = run_dir / EXPORT
        found |= {summary.export_step: folder} if folder.is_dir() else {}
    return dict(sorted(found.items()))


def choose_export(run_dir: Path, step: str) -> int:
    """Return the exported step that is meant: a number, best, or last, the newest. Raise UserError, to follow the
    source, if the run has not exported it."""
    exports = find_exports(run_dir)
    if step == "best":
        if (best := read_best(run_dir)) is None or best.step == 0:
            raise UserError(f"needs the best step of {run_dir.name}, but its best.json names no step that has trained")
        chosen = best.step
    else:
        chosen = next(reversed(exports), -1) if step == "last" else int(step)
    if chosen not in exports:
        raise UserError(describe_missing(run_dir, step if chosen < 0 else str(chosen), list(exports)))
    return chosen


def describe_missing(run_dir: Path, step: str, exported: list[int]) -> str:
    """Return why a step has no model to begin with."""
    if not run_dir.is_dir():
        return f"needs the folder {run_dir}, which does not exist: {run_dir.name} has not started with this claim"
    has = f"exports of the steps {', '.join(map(str, exported))}" if exported else "no export"
    return (
        f"needs an export of the step {step} of {run_dir.name}, which has {has}; name such a step, or set "
        f"checkpoint.exportPolicy in {run_dir.name}: last and best export at its end, every exports each checkpoint"
    )
