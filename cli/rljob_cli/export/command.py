"""`rljob export`: from a run's folder, which may belong to a run that failed, was stopped or is in progress."""

from __future__ import annotations

import sys
from pathlib import Path

from rljob_api.errors import UserError
from rljob_api.run.folder import FILE_JOB, FILE_METRICS
from rljob_api.run.metrics import read_metrics
from rljob_cli.exits import guard
from rljob_cli.export.card import FILE_CARD, build_card
from rljob_cli.export.steps import export_step, is_step, read_step
from rljob_cli.output import print_json
from rljob_cli.report.collect import read_job, read_summary
from rljob_cli.run.summary import build_serve_command
from rljob_cli.trajectories.log import find_run
from rljob_inputs.machine.installation import find_device_extra, require


@guard
def export_command(run: str, name: str, to: Path, directory: Path, output: str) -> int:
    """Write the model of a step to `to`, which exists only once the model in it is complete, and its card."""
    require(find_device_extra(), "rljob export")
    given = f"--step {name}"
    if not is_step(name):
        raise UserError(f"{given}: must be the number of a step, last or best")
    if to.exists():
        raise UserError(f"--to {to}: exists; choose a new folder")
    folder, to = find_run(run, directory).resolve(), to.absolute()
    step = read_step(folder, name, given)
    print(f"exports step {step} of {folder}", file=sys.stderr, flush=True)
    export_step(folder, step, to, given)
    job, _ = read_job(folder / FILE_JOB)
    metrics = read_metrics(folder / FILE_METRICS)
    job_name = str(((job or {}).get("metadata") or {}).get("name") or folder.name)
    summary = read_summary(folder, job_name, job, metrics)
    (to / FILE_CARD).write_text(build_card(job_name, step, job or {}, metrics, summary), encoding="utf-8")
    arguments = (((job or {}).get("spec") or {}).get("data") or {}).get("chatTemplateArguments") or {}
    serve = build_serve_command(str(to), arguments)
    if output == "json":
        print_json({"run": str(folder), "step": step, "folder": str(to), "serve": serve})
    else:
        print(f"{to}\nserve it with: {serve}")
    return 0
