"""`rljob export`: from a run's folder, which may belong to a run that failed, was stopped or is in progress, or from a
job in a cluster, to a folder, to object storage or to the Hub.

Of a job in a cluster, the model of the step is copied first: an export if there is one, else the checkpoint.

Invariant: a place that refuses the model says so before the model is built.
"""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rljob_api.errors import UserError
from rljob_api.manifest.sources import parse_source
from rljob_api.run.folder import FILE_JOB, FILE_METRICS
from rljob_api.run.metrics import read_metrics
from rljob_cli.cluster.other_versions import parse_job
from rljob_cli.exits import guard
from rljob_cli.export.card import FILE_CARD, build_card
from rljob_cli.export.steps import export_step, is_step, read_step
from rljob_cli.options import ExportOptions
from rljob_cli.output import print_json, say
from rljob_cli.report.collect import name_run, read_job, read_summary
from rljob_cli.run.runfolder import dump
from rljob_cli.run.summary import build_serve_command
from rljob_cli.trajectories.log import find_run
from rljob_inputs.hub.repository import HubAccess
from rljob_inputs.hub.uploads import require_private, upload_model
from rljob_inputs.machine.installation import find_device_extra, require
from rljob_inputs.objects.access import is_object
from rljob_inputs.objects.uploads import require_empty, upload_folder

_LAST = ("config.json",)
"""Without it, libraries take no folder for a model."""


class Destination(Protocol):
    """A place other than a folder of this machine."""

    def check(self) -> None:
        """Raise UserError if the model cannot be written there, and TransientError."""

    def publish(self, folder: Path, message: str) -> str:
        """Write the complete model, and return its place. `message`: of the commit. Raise as `check`."""


@dataclass(frozen=True)
class Objects:
    url: str
    access: HubAccess

    def check(self) -> None:
        require_empty(self.url, self.access.objects)

    def publish(self, folder: Path, message: str) -> str:
        upload_folder(folder, self.url, self.access.objects, last=_LAST, report=say)
        return self.url


@dataclass(frozen=True)
class HubModel:
    source: str
    access: HubAccess
    is_public: bool

    def check(self) -> None:
        require_private(self.source, self.access, may_be_public=self.is_public)

    def publish(self, folder: Path, message: str) -> str:
        say(f"uploads {self.source}")
        return upload_model(folder, self.source, self.access, is_public=self.is_public, message=message)


def find_destination(to: str, *, is_public: bool) -> Destination | None:
    """Return the place that `--to` names; None for a folder. Raise UserError if it is none."""
    if is_public and not to.startswith("hf://"):
        raise UserError(f"--public is for --to hf://org/name, got --to {to}")
    if "://" not in to:
        return None
    try:
        kind = parse_source(to).kind
    except UserError:
        kind = "relative"
    access = HubAccess.from_environment(os.environ)
    if kind == "hf" and "/" in to.removeprefix("hf://").rstrip("/"):
        return HubModel(to.rstrip("/"), access, is_public)
    if kind == "object":
        return Objects(to.rstrip("/"), access)
    raise UserError(f"--to {to}: must be a new folder, s3://bucket/path or hf://org/name")


@guard
def export_command(options: ExportOptions) -> int:
    """Write the model of a step and its card to `to`: a folder, which exists only once the model in it is complete, or
    the URL of objects or of a repository. With a target, the run is that of a job in a cluster."""
    run, name, to, output, target = options.run, options.step, options.to, options.output, options.target
    if not target:
        require(find_device_extra(), "rljob export")
    given = f"--step {name}"
    if not is_step(name):
        raise UserError(f"{given}: must be the number of a step, last or best")
    destination = find_destination(to, is_public=options.public)
    if destination is None and Path(to).exists():
        raise UserError(f"--to {to}: exists; choose a new folder")
    if not target:
        folder = find_run(run, options.directory).resolve()
        step = read_step(folder, name, given)
        if destination is not None:
            destination.check()
        return _publish(_Source(str(folder), folder, step), to, destination, given, output)
    if destination is not None:
        destination.check()
    from rljob_cli.cluster.commands import on_cluster
    from rljob_cli.export import from_cluster

    parent = Path(to).absolute().parent if destination is None else Path.cwd()
    parent.mkdir(parents=True, exist_ok=True)
    return on_cluster(from_cluster.use_model)(
        target,
        run,
        name,
        given,
        parent,
        lambda copy, step, export: _publish(_Source(run, copy, step, export), to, destination, given, output),
    )


@dataclass(frozen=True)
class _Source:
    """The model of a step."""

    given: str
    """The run, as the result names it."""
    folder: Path
    """The run's, or a copy that has this step."""
    step: int
    export: Path | None = None
    """It is in Hugging Face format already, in a copy; else it is the checkpoint's."""


def _publish(source: _Source, to: str, destination: Destination | None, given: str, output: str) -> int:
    folder, step = source.folder, source.step
    if destination is None:
        job, template = _write_model(source, Path(to).absolute(), given)
        place = str(Path(to).absolute())
    else:
        # Beside the checkpoints, where models have room.
        with tempfile.TemporaryDirectory(prefix=".export-", dir=folder) as parent:
            model = Path(parent) / "model"
            job, template = _write_model(source, model, given)
            place = destination.publish(model, f"Step {step} of {job}, by RLJob")
    name = to.removeprefix("hf://") if to.startswith("hf://") else place  # by which vLLM loads it
    serve = "" if destination is not None and is_object(to) else build_serve_command(name, template)
    if output == "json":
        print_json({"run": source.given, "step": step, "folder": place, "serve": serve})
    else:
        print(f"{place}\nserve it with: {serve}" if serve else place)
    return 0


def _write_model(source: _Source, to: Path, given: str) -> tuple[str, Mapping[str, Any]]:
    """Write the model and its card to a new folder. Return the job's name and the arguments of its chat template."""
    folder, step = source.folder, source.step
    say(f"exports step {step} of {source.given}")
    if source.export is None:
        export_step(folder, step, to, given)
    else:
        to.parent.mkdir(parents=True, exist_ok=True)
        source.export.rename(to)  # the copy is on the same disk
    job = _complete(read_job(folder / FILE_JOB)[0])
    metrics = read_metrics(folder / FILE_METRICS)
    job_name = name_run(job, folder)
    summary = read_summary(folder, job_name, job, metrics)
    (to / FILE_CARD).write_text(build_card(job_name, step, job or {}, metrics, summary), encoding="utf-8")
    return job_name, (((job or {}).get("spec") or {}).get("data") or {}).get("chatTemplateArguments") or {}


def _complete(job: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the manifest with its defaults, which a job of a cluster has not stored."""
    parsed = parse_job(job) if job else None
    return dump(parsed) if parsed else job
