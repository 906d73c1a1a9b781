"""A job that starts from a run on this machine: spec.model.source is job://NAME@STEP.

    job://sums@last --> step 20 of runs/sums --> `rljob run` exports it to runs/NAME/model --> model.json pins it

Reads alone; `rljob_cli.export.steps` writes. Invariant: a run that has its model keeps it, whatever happens to
the other run.

And the copy in .models of a model of the Hub, for machines without a network.
"""

import contextlib
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

from rljob_api.errors import TransientError, UserError
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.sources import Source, parse_source
from rljob_api.run import start_model
from rljob_api.run.folder import FILE_JOB, complete_checkpoints, current_export
from rljob_api.run.start_model import Pin
from rljob_api.run.summaries import read_best
from rljob_cli.output import say
from rljob_inputs.hub import Repository, find_repository

_CHECKOUT = Path(sys.prefix).parent
FIELD = "spec.model.source"
MODEL = "model"
"""Folder of a run with the model that it has begun with."""


@dataclass(frozen=True)
class StartModel:
    """What job:// means on this machine."""

    pin: Pin
    is_pinned: bool
    """Whether the run has the model already."""
    path: str
    """The model; or, until it is exported, one of the same shape: that which the other run began with."""
    has_weights: bool
    """Whether `path` has the step's weights."""


def find_start_model(source: str, runs: Path, folder: Path | None) -> StartModel | None:
    """Return the model that `source` names; None if it is not job://. `runs`: the parent of run folders. `folder`: that
    of the job's run, which may have its model; None for a new one. Raise UserError, to follow the field, if there is no
    such run or step."""
    try:
        parsed = parse_source(source)
    except UserError:
        return None  # reported by its own rule
    if parsed.kind != "job":
        return None
    if folder is not None and (pin := read_pin(folder)) is not None and pin.source == source:
        return StartModel(pin, is_pinned=True, path=str(folder / MODEL), has_weights=True)
    run = (runs / parsed.path).resolve()
    step = _find_step(run, parsed)
    if export := current_export(run, step):
        return StartModel(Pin(source=source, run=str(run), step=step), False, str(export), has_weights=True)
    return StartModel(Pin(source=source, run=str(run), step=step), False, _read_base(run), has_weights=False)


def require_weights(start: StartModel | None) -> None:
    """Raise UserError if a command that runs the model has only one of its shape."""
    if start is not None and not start.has_weights:
        pin = start.pin
        raise UserError(
            f"{FIELD}: {pin.source} is step {pin.step} of {pin.run}, which is not exported; `rljob run` exports it; "
            f"here, pass --set {FIELD}=DIR after `rljob export {shlex.quote(pin.run)} --step {pin.step} --to DIR`"
        )


def read_pin(folder: Path) -> Pin | None:
    """Return which model a run has; None if it has none, or not a whole one."""
    pin = start_model.read_pin(folder)
    return pin if (folder / MODEL / "config.json").is_file() else None


def _find_step(run: Path, parsed: Source) -> int:
    if not (run / FILE_JOB).is_file():
        raise UserError(f"needs the run {run}, which does not exist; correct the name, or pass --dir with its parent")
    known = complete_checkpoints(run)
    if parsed.step == "best":
        if (best := read_best(run)) is None or best.step == 0:
            raise UserError(f"needs the best step of {run}, but best.json names no step that has trained; name a step")
        step = best.step
    elif parsed.step == "last":
        step = next(reversed(known), 0)
    else:
        step = int(parsed.step)
    if step not in known and current_export(run, step) is None:
        has = f"checkpoints of the steps {', '.join(map(str, known))}" if known else "no checkpoint"
        raise UserError(f"needs a checkpoint of step {parsed.step} of {run}, which has {has}; name one of them")
    return step


def _read_base(run: Path) -> str:
    """Return the source of the model that the run began with."""
    try:
        return str(yaml.safe_load((run / FILE_JOB).read_text(encoding="utf-8"))["spec"]["model"]["source"])
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError) as error:
        raise UserError(f"needs {run / FILE_JOB}, which is not readable: {error}") from None


def find_copy(source: str, folder: Path) -> Path | None:
    """Return the copy of a model of the Hub in .models, where `make demo` writes one, in a folder or above it; None:
    there is none."""
    name = f".models/{source.rpartition('/')[2].lower()}"
    places = (folder.resolve(), *folder.resolve().parents)
    return next((each / name for each in places if source.startswith("hf://") and (each / name).is_dir()), None)


def use_copy(job: RLJob, folder: Path, run: Path | None) -> RLJob:
    """Return the job with a copy of its model, also one in the checkout that this program is of, if the Hub does not
    answer and its cache does not have the model. A run that began with the copy keeps it, as its checkpoints need."""
    model = job.spec.model
    if model.revision is None and (copy := find_copy(model.source, folder) or find_copy(model.source, _CHECKOUT)):
        try:
            if run and (run / FILE_JOB).is_file() and _read_base(run) == str(copy):
                say(f"takes the copy {copy} of {model.source}, with which the run in {run} began")
                return set_model(job, str(copy))
            _ask(job)
        except TransientError:
            say(f"the Hub does not answer, and its cache has no {model.source}: takes the copy {copy}")
            return set_model(job, str(copy))
        except UserError:  # another check names it with its place
            pass
    return job


def go_offline(job: RLJob) -> None:
    """Ask the Hub for the job's model, once for this process and those that it forks. If it does not answer, let all
    programs take the model from its cache: vLLM would fail."""
    source = job.spec.model.source
    with contextlib.suppress(UserError, TransientError):  # the checks report it
        if source.startswith("hf://") and _ask(job).is_cached:
            say(f"the Hub does not answer: takes {source} from its cache")
            os.environ["HF_HUB_OFFLINE"] = "1"


def _ask(job: RLJob) -> Repository:
    from rljob_inputs.check import find_access

    model = job.spec.model
    return find_repository(model.source, "model", model.revision, find_access(job, os.environ))


def set_model(job: RLJob, path: str) -> RLJob:
    """Return the job with another source of its model."""
    model = job.spec.model.model_copy(update={"source": path})
    return job.with_spec(model=model)
