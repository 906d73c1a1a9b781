"""Runs on this machine as the commands on jobs show them: ls, top, explain, logs and suspend; and `rljob try`.

A command on a job means a run here if that is named by its path, is in progress, or if there is no cluster.
"""

import contextlib
import os
import shlex
import signal
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from rljob_api.errors import UserError
from rljob_api.run.folder import FILE_JOB, FILE_METRICS, TRAJECTORIES
from rljob_api.run.metrics import read_metrics
from rljob_cli.check.device_fields import DEFAULT_MODEL
from rljob_cli.check.jobfile import load_partial
from rljob_cli.check.scaffold import find_copy
from rljob_cli.cluster.logs import Line, Selection, make_printer
from rljob_cli.commands import parse_claims, run_file, shorten
from rljob_cli.exits import guard
from rljob_cli.options import RUNS, RunOptions, Target
from rljob_cli.output import print_json, say
from rljob_cli.report.collect import read_job, read_summary
from rljob_cli.run import summary
from rljob_cli.run.runfolder import find_process, is_in_use
from rljob_cli.tables import Column, build_table, show
from rljob_cli.trajectories.conversation import LEGEND, build_conversation
from rljob_cli.trajectories.index import Query, read_rows
from rljob_cli.trajectories.log import find_run
from rljob_cli.ui.runs import describe, list_runs
from rljob_inputs.machine.installation import find_device_extra, require

_POLL_SECONDS = 1.0
_FIELDS = ("namespace", "name", "phase", "step", "total_steps", "reward", "waits_for")
_HERE = "(here)"


def has_cluster(target: Target) -> bool:
    return bool(target or os.environ.get("KUBECONFIG")) or Path("~/.kube/config").expanduser().exists()


def find_here(name: str, target: Target) -> Path | None:
    """Return the folder of the run that the name of a job means; None: a job in the cluster."""
    with contextlib.suppress(UserError):
        folder = find_run(name, RUNS).resolve()
        is_meant = not has_cluster(target) or (not target and ("/" in name or is_in_use(folder)))
        return folder if is_meant and (folder / FILE_JOB).exists() else None
    return None


@guard
def list_command(target: Target, directory: Path, *, everywhere: bool, output: str) -> int:
    found = [describe(run.name, run, read_metrics(run / FILE_METRICS)) for run in list_runs(directory)]
    rows = [[_HERE, run.name, run.phase, run.step, run.total_steps, run.reward, run.changed] for run in found]
    if has_cluster(target):
        from rljob_cli.cluster.commands import list_jobs

        rows += [[getattr(job, field) for field in _FIELDS] for job in list_jobs(target, everywhere)]
    if output == "json":
        print_json([dict(zip(_FIELDS, row, strict=True)) for row in rows])
    else:
        header = [Column(name, is_text=True, least=100) for name in ("NAMESPACE", "NAME")]
        shown = [[*row[:3], f"{row[3]}/{row[4]}", summary.show_number(row[5]), row[6]] for row in rows]
        table = build_table([*header, "PHASE", "STEP", "REWARD", "CHANGED, OR WAITS FOR"], shown)
        show(table if rows else "no run here, and no job in a cluster; `rljob init DIR` writes a job")
    return 0


@guard
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


@guard
def stop_run(folder: Path, output: str) -> int:
    if (process := find_process(folder)) is None:
        raise UserError(f"{folder}: is not in progress; the `rljob run` that started it resumes it")
    os.kill(process, signal.SIGINT)
    message = f"{folder} is being stopped, as by Ctrl-C; the same `rljob run` resumes from its last checkpoint"
    print_json({"message": message}) if output == "json" else print(message)
    return 0


@guard
def print_logs(folder: Path, selection: Selection, *, follow: bool) -> int:
    """Print the log of each Pod, and with `follow` what is added until the run ends."""
    printer, known = make_printer(), dict[Path, int]()
    while True:
        is_last = not follow or not is_in_use(folder)
        for file in sorted((folder / "logs").glob(f"*-{selection.role or ''}*.log")):
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            first = known.get(file, 0 if selection.tail is None else max(0, len(lines) - selection.tail))
            for line in lines[first:]:
                printer.print(Line("", file.stem, line))
            known[file] = len(lines)
        if is_last:
            return 0
        time.sleep(_POLL_SECONDS)


@guard
def try_command(options: RunOptions) -> int:
    """Run one step of as few samples as there can be, in a folder that is removed, and show them."""
    require(find_device_extra(), "rljob try")
    path, claims = options.files.path, parse_claims(options.volumes)
    small = find_copy(DEFAULT_MODEL, path.parent)
    model = [f"spec.model.source={small}"] if small != DEFAULT_MODEL else []
    file = load_partial(path, [*model, *(options.overrides or [])])
    say(f"tries {path} with {file.job.spec.model.source}")
    file = replace(file, job=shorten(file.job.with_spec(data=file.job.spec.data.model_copy(update={"eval": None}))))
    with tempfile.TemporaryDirectory(prefix="rljob-try-") as scratch:
        folder = Path(scratch).resolve() / file.job.metadata.name
        code = run_file(file, folder, claims, options)
        for row in read_rows(folder / TRAJECTORIES, Query(lane="train")):
            show(build_conversation(row, full=False, tokens=True))
    show(LEGEND)
    return code
