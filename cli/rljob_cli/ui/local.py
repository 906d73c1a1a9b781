"""Runs on this machine as the commands on jobs show them: ls, top, explain and suspend."""

import os
import shlex
import signal
from pathlib import Path
from typing import Any

from rljob_api.errors import UserError
from rljob_api.manifest.base import ObjectMeta
from rljob_api.manifest.job import RLJob
from rljob_api.run.folder import FILE_JOB, FILE_METRICS, FILE_SERVICE
from rljob_api.run.metrics import read_metrics
from rljob_cli.exits import EXIT_FAILED
from rljob_cli.options import Target
from rljob_cli.output import print_json, say
from rljob_cli.report.collect import read_job, read_summary
from rljob_cli.run import summary
from rljob_cli.run.runfolder import find_process, is_in_use
from rljob_cli.tables import Column, build_table, show
from rljob_cli.ui.runs import describe, list_runs

_FIELDS = ("namespace", "name", "phase", "step", "total_steps", "reward", "waits_for")
_HERE = "(here)"


def list_command(target: Target, directory: Path, *, everywhere: bool, output: str) -> int:
    found = [describe(run.name, run, read_metrics(run / FILE_METRICS)) for run in list_runs(directory)]
    rows: list[list[Any]] = [[_HERE, run.name, run.phase, run.step, run.total_steps, run.reward, ""] for run in found]
    is_unknown = False
    if target.exists():
        from rljob_cli.cluster.client import ClusterError
        from rljob_cli.cluster.commands import list_jobs

        try:
            rows += [[getattr(job, field) for field in _FIELDS] for job in list_jobs(target, everywhere)]
        except ClusterError as error:
            is_unknown = True
            say(f"warning: {error}")
    if output == "json":
        print_json([dict(zip(_FIELDS, row, strict=True)) for row in rows])
    else:
        header = [Column(name, is_text=True, least=100) for name in ("NAMESPACE", "NAME")]
        shown = [[*row[:3], f"{row[3]}/{row[4]}", summary.show_number(row[5]), row[6]] for row in rows]
        table = build_table([*header, "PHASE", "STEP", "REWARD", "WAITS FOR"], shown)
        jobs = "" if is_unknown else ", and no job in a cluster"
        show(table if rows else f"no run here{jobs}; `rljob init DIR` writes a job")
    return EXIT_FAILED if is_unknown and target else 0


def explain_run(folder: Path, output: str) -> int:
    """Show the summary of a run, and what can be done with it."""
    found = read_summary(folder, folder.name, read_job(folder / FILE_JOB)[0], read_metrics(folder / FILE_METRICS))
    verbs = ["logs", "trajectories", "ui", *(["suspend"] if is_in_use(folder) else [])]
    following = [f"rljob {verb} {shlex.quote(os.path.relpath(folder))}" for verb in verbs]
    if output == "json":
        print_json(found.model_dump(mode="json") | {"next": following})
    else:
        show(summary.build_table(found))
        show("next: " + "\n      ".join(following))
    return 0


def print_logs(folder: Path, role: str | None, tail: int | None, *, follow: bool) -> int:
    from rljob_cli.cluster.logs import check_role, print_run
    from rljob_core.children.common import child_name

    files, job = "*.log", read_job(folder / FILE_JOB)[0]
    if role and job:
        metadata = {"namespace": _HERE, **job["metadata"]}
        check_role(job | {"metadata": metadata}, role)
        owner = RLJob.model_construct(metadata=ObjectMeta(name=metadata["name"]), spec=job["spec"])
        files = f"{child_name(owner, role)}-*.log"
    return print_run(folder, files, tail, follow=follow)


def stop_run(folder: Path, output: str) -> int:
    command = "serve" if (folder / FILE_SERVICE).exists() else "run"
    if (process := find_process(folder)) is None:
        raise UserError(f"{folder}: is not in progress; the `rljob {command}` that started it resumes it")
    os.kill(process, signal.SIGINT)
    message = f"{folder} is being stopped, as by Ctrl-C; the same `rljob {command}` goes on from what it kept"
    if output == "json":
        print_json({"message": message})
    else:
        print(message)
    return 0
