"""`rljob export`: from a run's folder, which may belong to a run that failed, was stopped or is in progress, to a
folder, to object storage or to the Hub.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rljob_api.errors import UserError
from rljob_api.run.folder import FILE_JOB, FILE_METRICS
from rljob_api.run.metrics import read_metrics
from rljob_cli.exits import guard
from rljob_cli.export.card import FILE_CARD, build_card
from rljob_cli.export.destinations import find_destination
from rljob_cli.export.steps import export_step, is_step, read_step
from rljob_cli.output import print_json
from rljob_cli.report.collect import read_job, read_summary
from rljob_cli.run.summary import build_serve_command
from rljob_cli.trajectories.log import find_run
from rljob_inputs.machine.installation import find_device_extra, require
from rljob_inputs.objects.access import is_object


@guard
def export_command(run: str, name: str, to: str, directory: Path, output: str, *, is_public: bool = False) -> int:
    """Write the model of a step and its card to `to`: a folder, which exists only once the model in it is complete, or
    the URL of objects or of a repository."""
    require(find_device_extra(), "rljob export")
    given = f"--step {name}"
    if not is_step(name):
        raise UserError(f"{given}: must be the number of a step, last or best")
    destination = find_destination(to, is_public=is_public)
    if destination is None and Path(to).exists():
        raise UserError(f"--to {to}: exists; choose a new folder")
    folder = find_run(run, directory).resolve()
    step = read_step(folder, name, given)
    if destination is None:
        job, template = _write_model(folder, step, Path(to).absolute(), given)
        place = str(Path(to).absolute())
    else:
        destination.check()
        # Beside the checkpoints, where models have room.
        with tempfile.TemporaryDirectory(prefix=".export-", dir=folder) as parent:
            model = Path(parent) / "model"
            job, template = _write_model(folder, step, model, given)
            place = destination.publish(model, f"Step {step} of {job}, by RLJob")
    serve = "" if destination is not None and is_object(to) else build_serve_command(_serve_name(to, place), template)
    if output == "json":
        print_json({"run": str(folder), "step": step, "folder": place, "serve": serve})
    else:
        print(f"{place}\nserve it with: {serve}" if serve else place)
    return 0


def _serve_name(to: str, place: str) -> str:
    """Return what vLLM loads the model by."""
    return to.removeprefix("hf://") if to.startswith("hf://") else place


def _write_model(folder: Path, step: int, to: Path, given: str) -> tuple[str, Mapping[str, Any]]:
    """Write the model and its card to a new folder. Return the job's name and the arguments of its chat template."""
    print(f"exports step {step} of {folder}", file=sys.stderr, flush=True)
    export_step(folder, step, to, given)
    job, _ = read_job(folder / FILE_JOB)
    metrics = read_metrics(folder / FILE_METRICS)
    job_name = str(((job or {}).get("metadata") or {}).get("name") or folder.name)
    summary = read_summary(folder, job_name, job, metrics)
    (to / FILE_CARD).write_text(build_card(job_name, step, job or {}, metrics, summary), encoding="utf-8")
    return job_name, (((job or {}).get("spec") or {}).get("data") or {}).get("chatTemplateArguments") or {}
