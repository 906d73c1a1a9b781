"""What --model names: a model's source, or a step of a run, whose sharded checkpoint becomes a folder of Hugging Face.

Exports are kept in the run's folder, so that a step is exported once.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rljob_api.errors import UserError
from rljob_api.manifest.sources import parse_source
from rljob_api.run.folder import EXPORT, export_folder, last_checkpoint
from rljob_api.run.summaries import read_best
from rljob_cli.trajectories.log import find_run

_MAX_NAME = 40
"""Length of metadata.name."""
_LAST, _BEST, _EXPORT = "last", "best", EXPORT


@dataclass(frozen=True)
class Candidate:
    """A model to evaluate."""

    given: str
    """As the user named it."""
    source: str
    """hf://, pvc://, or an absolute path."""
    revision: str | None = None
    is_own: bool = False
    """Whether it is spec.model, with its own settings."""
    run: Path | None = None
    step: int | None = None
    """The checkpoint to export to `source`; None: it is there already."""

    @property
    def is_local(self) -> bool:
        """Whether it is a folder of this machine that --model names."""
        return not self.is_own and Path(self.source).is_absolute() and (self.step is not None or self.exists)

    @property
    def exists(self) -> bool:
        return Path(self.source).is_dir()

    @property
    def slug(self) -> str:
        """A part of a DNS label."""
        text = self.given.removeprefix("hf://").removeprefix("pvc://")
        name = "-".join(Path(text).parts[-2:] if "@" in text else [Path(text).name])
        return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "model"


def find_candidates(given: Sequence[str], own: str, directory: Path, *, in_cluster: bool = False) -> list[Candidate]:
    """Return the models that `given` names; without any, spec.model, whose source is `own`. `directory`: the parent of
    run folders. With `in_cluster`, an absolute path that is not here is one in the Pods. Raise UserError for a model
    that does not exist, or that is named twice."""
    if not given:
        return [Candidate(own, own, is_own=True)]
    found = [_find(each, directory, in_cluster=in_cluster) for each in given]
    if twice := [each for each in given if list(given).count(each) > 1]:
        raise UserError(f"--model {twice[0]} is given twice")
    return found


def _find(given: str, directory: Path, *, in_cluster: bool) -> Candidate:
    path, separator, suffix = given.rpartition("@")
    if given.startswith("hf://"):
        return Candidate(given, path, suffix) if separator else Candidate(given, given)
    if given.startswith("pvc://"):
        parse_source(given)
        return Candidate(given, given)
    if (folder := Path(given)).is_dir():
        if not (folder / "config.json").is_file():
            remedy = "pass a Hugging Face folder, hf://org/name, or RUN@STEP for a checkpoint of a run"
            raise UserError(f"--model {given}: has no config.json; {remedy}")
        return Candidate(given, str(folder.resolve()))
    if in_cluster and "@" not in given and given.startswith("/"):
        return Candidate(given, given)
    if not separator:
        raise UserError(f"--model {given}: not found; pass a folder, hf://org/name, pvc://claim/path, or RUN@STEP")
    return _find_step(given, find_run(path, directory).resolve(), suffix)


def _find_step(given: str, run: Path, suffix: str) -> Candidate:
    if suffix == _EXPORT:
        if not (run / EXPORT).is_dir():
            raise UserError(
                f"--model {given}: {run} has no export: it is written at the end; pass RUN@last or RUN@STEP"
            )
        return Candidate(given, str(run / EXPORT))
    step = _read_step(given, run, suffix)
    if step is None:
        raise UserError(f"--model {given}: {run} has no checkpoint")
    folder = export_folder(run, step)
    return Candidate(given, str(folder), run=run, step=None if folder.is_dir() else step)


def _read_step(given: str, run: Path, suffix: str) -> int | None:
    """Return the step that `suffix` names; None: the run has no checkpoint."""
    if suffix == _LAST:
        return last_checkpoint(run)
    if suffix == _BEST:
        if (best := read_best(run)) is None:
            problem = "has no best.json: set evaluation.best in the job, or pass RUN@STEP"
            raise UserError(f"--model {given}: {run} {problem}")
        return best.step
    if not suffix.isdecimal():
        expected = "the step of a checkpoint, last, best or export"
        raise UserError(f"--model {given}: after @ must be {expected}, got {suffix}")
    return int(suffix)


def export(candidate: Candidate, say: Callable[[str], None]) -> None:
    """Write the model of a checkpoint, unless it is there. The trainer's own export does it, in a process: the CLI
    loads no torch. Raise UserError with its message if it fails."""
    if candidate.step is None:
        return
    say(f"exports step {candidate.step} of {candidate.run} to {candidate.source}")
    command = [sys.executable, "-m", "rljob_trainer.policy.export_step"]
    arguments = [str(candidate.run), str(candidate.step), candidate.source]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UserError(f"--model {candidate.given}: {reason.removeprefix('error: ')}")


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
