"""What --model names: a model's source, or a step of a run, whose sharded checkpoint becomes a folder of Hugging Face.

Exports are kept in the run's folder, so that a step is exported once.

The jobs that evaluate models are changes of fields of a job that trains, so that each is read and checked like any
other file.
"""

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.sources import parse_source
from rljob_api.run.folder import EXPORT, current_export, export_folder
from rljob_cli.export.steps import export_step, is_step, read_step
from rljob_cli.output import Say
from rljob_cli.trajectories.log import find_run
from rljob_inputs.hub import read_source
from rljob_inputs.objects.access import is_object

_SHARED_FIELDS = ("image", "resources", "nodePool", "env", "template")
"""Fields of the rollouts' Pods that are the trainer's with rollout.placement trainer."""


_MAX_NAME = 40
"""Length of metadata.name."""


@dataclass(frozen=True)
class Candidate:
    """A model to evaluate."""

    given: str
    """As the user named it."""
    source: str
    """hf://, pvc://, s3://, or an absolute path."""
    revision: str | None = None
    is_own: bool = False
    """Whether it is spec.model, with its own settings."""
    run: Path | None = None
    step: int | None = None
    """The checkpoint to export to `source`; None: it is there already."""

    @property
    def slug(self) -> str:
        """A part of a DNS label."""
        text = self.given.rpartition("://")[2]
        name = "-".join(Path(text).parts[-2:] if "@" in text else [Path(text).name])
        return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "model"


def find_candidates(given: Sequence[str], own: str, directory: Path) -> list[Candidate]:
    """Return the models that `given` names; without any, spec.model, whose source is `own`. `directory`: the parent of
    run folders. Raise UserError for a model that does not exist, or that is named twice."""
    if not given:
        return [Candidate(own, own, is_own=True)]
    found = [_find(each, directory) for each in given]
    if twice := [each for each in given if list(given).count(each) > 1]:
        raise UserError(f"--model {twice[0]} is given twice")
    return found


def _find(given: str, directory: Path) -> Candidate:
    given = read_source(given, Path())
    path, separator, suffix = given.rpartition("@")
    if given.startswith("hf://"):
        return Candidate(given, path, suffix) if separator else Candidate(given, given)
    if given.startswith("pvc://") or is_object(given):
        parse_source(given)
        return Candidate(given, given)
    if (folder := Path(given)).is_dir():
        if not (folder / "config.json").is_file():
            remedy = "pass a Hugging Face folder, hf://org/name, or RUN@STEP for a checkpoint of a run"
            raise UserError(f"--model {given}: has no config.json; {remedy}")
        return Candidate(given, str(folder.resolve()))
    if not separator:
        others = "hf://org/name, pvc://claim/path, s3://bucket/path, or RUN@STEP"
        raise UserError(f"--model {given}: not found; pass a folder, {others}")
    return _find_step(given, find_run(path, directory).resolve(), suffix)


def _find_step(given: str, run: Path, suffix: str) -> Candidate:
    if suffix == EXPORT:
        if not (run / EXPORT).is_dir():
            raise UserError(
                f"--model {given}: {run} has no export: it is written at the end; pass RUN@last or RUN@STEP"
            )
        return Candidate(given, str(run / EXPORT))
    if not is_step(suffix):
        raise UserError(
            f"--model {given}: after @ must be the step of a checkpoint, last, best or export, got {suffix}"
        )
    step = read_step(run, suffix, f"--model {given}")
    folder = export_folder(run, step)
    return Candidate(given, str(folder), run=run, step=None if current_export(run, step) else step)


def export(candidate: Candidate, say: Say) -> None:
    """Write the model of a checkpoint, unless it is there and current. Raise UserError if it fails."""
    if candidate.step is None:
        return
    assert candidate.run is not None
    say(f"exports step {candidate.step} of {candidate.run} to {candidate.source}")
    shutil.rmtree(candidate.source, ignore_errors=True)  # of the step's earlier training
    export_step(candidate.run, candidate.step, Path(candidate.source), f"--model {candidate.given}")


def name_jobs(job: str, candidates: Sequence[Candidate]) -> list[str]:
    """Return a name for the job of each model: different, and at most 40 characters."""
    names: list[str] = []
    for index, candidate in enumerate(candidates, 1):
        name = f"{job}-eval-{candidate.slug}"[:_MAX_NAME].strip("-")
        if name in names or len(f"{job}-eval-") >= _MAX_NAME:
            suffix = f"-{index}"
            name = name[: _MAX_NAME - len(suffix)].strip("-") + suffix
        names.append(name)
    return names


def list_overrides(job: RLJob, candidate: Candidate, name: str) -> list[str]:
    """Return what to set in the job's file to evaluate one model."""
    changes: dict[str, Any] = {"metadata.name": name, "spec.task": "evaluate"}
    if not candidate.is_own:
        changes |= {"spec.model.source": candidate.source, "spec.model.revision": candidate.revision}
    changes |= dict(_separate(job))
    return [f"{path}={json.dumps(value)}" for path, value in changes.items()]


def _separate(job: RLJob) -> Iterator[tuple[str, Any]]:
    """Yield the fields by which engines in the trainer's Pods get Pods of their own."""
    spec = job.spec
    for path in spec.models_in_trainer:
        yield f"{path}.placement", "separate"
    if spec.shares_trainer:
        yield "spec.rollout.placement", "separate"
        yield "spec.rollout.weightTransfer", "file"
        yield "spec.rollout.replicas", spec.num_rollout_replicas
        trainer = spec.trainer.to_manifest(exclude_defaults=True)
        yield from ((f"spec.rollout.{field}", trainer[field]) for field in _SHARED_FIELDS if field in trainer)
