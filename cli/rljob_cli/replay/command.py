"""`rljob run --from-trajectories`: checks the run and the job, replays the steps, and prints what differs."""

import asyncio
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from rljob_api.errors import UserError
from rljob_api.run.folder import FILE_JOB, FILE_METRICS, TRAJECTORIES, complete_checkpoints, list_trajectory_files
from rljob_api.run.metrics import StepRecord, read_metrics
from rljob_cli.check.job_source import require_weights
from rljob_cli.check.jobfile import load
from rljob_cli.commands import parse_claims, use_fast_types
from rljob_cli.exits import EXIT_INTERRUPTED, guard
from rljob_cli.local.network import claim_block
from rljob_cli.options import RunOptions
from rljob_cli.output import Say, print_json
from rljob_cli.replay.comparison import ComparedStep, compare_steps, describe_result, to_json
from rljob_cli.replay.compatibility import find_changes, find_obstacles
from rljob_cli.replay.plan import ReplayPlan, StepRange, parse_steps, plan_replay
from rljob_cli.replay.processes import run_replay
from rljob_cli.run import runfolder
from rljob_cli.tables import build_table, choose_console, print_lines_on, show
from rljob_cli.trajectories.log import find_run
from rljob_inputs.machine.installation import find_device_extra, require

_SHOWN = {"loss": "loss", "grad norm": "grad_norm"}


@guard
def replay_command(options: RunOptions, run: str) -> int:
    require(find_device_extra(), "rljob run --from-trajectories")
    path, directory, output = options.files.path, options.directory, options.output
    claims, requested = parse_claims(options.volumes), None if options.steps is None else parse_steps(options.steps)
    file, source = load(path, options.overrides or [], runs=directory), find_run(run, directory).resolve()
    require_weights(file.start)
    job = file.job
    use_fast_types(job, claims)
    plan = plan_run(source, requested)
    before, now = _read_spec(source), runfolder.dump(job)["spec"]
    if obstacles := find_obstacles(before, now, plan.checkpoint):
        raise UserError("\n".join(f"{path}: {obstacle}" for obstacle in obstacles))
    changes = [change.describe() for change in find_changes(before, now)]
    say = print_lines_on(choose_console(output))
    folder = (directory / f"{job.metadata.name}-replay").resolve()
    if folder == source:
        raise UserError(f"{source}: the replay would be written to the folder that it reads; pass another --dir")
    with runfolder.lock(folder):
        if (folder / FILE_JOB).exists() and not options.fresh:
            raise UserError(f"{folder} has an earlier replay; pass --fresh, which renames it, or another --dir")
        if options.fresh and (old := runfolder.set_aside(folder)):
            say(f"the earlier replay is now {old}")
        runfolder.prepare(folder, job)
        say(plan.describe(requested))
        say("; ".join(["changed", *changes]) if changes else "the job is that of the run")
        recorded = {record.step: record for record in read_metrics(source / FILE_METRICS).steps}
        network = claim_block(str(folder), options.network)
        try:
            run_replay(job, source, plan, folder, network, claims, functools.partial(_show_step, say, recorded))
        except (KeyboardInterrupt, asyncio.CancelledError):
            return EXIT_INTERRUPTED
    compared = compare_steps(recorded.values(), read_metrics(folder / FILE_METRICS).steps)
    _print_result(compared, source, folder, plan, changes, output)
    return 0


def plan_run(run: Path, requested: StepRange | None) -> ReplayPlan:
    """Return what a replay of a run's folder trains on. Raise UserError if the folder has nothing to train on."""
    recorded = [file.step for file in list_trajectory_files(run / TRAJECTORIES) if file.lane == "train"]
    if not recorded:
        raise UserError(
            f"{run / TRAJECTORIES}: no step of training; a run writes them unless spec.tracking.trajectoriesSize is 0"
        )
    return plan_replay(recorded, complete_checkpoints(run), requested)


def _read_spec(run: Path) -> dict[str, Any]:
    """Return the spec of the run's job, with all defaults."""
    try:
        spec: dict[str, Any] = yaml.safe_load((run / FILE_JOB).read_text())["spec"]
        return spec
    except (OSError, KeyError, TypeError, yaml.YAMLError):
        raise UserError(
            f"{run / FILE_JOB}: cannot be read; a replay compares its job with that of the run: copy the file that "
            "`rljob run` has written next to the log"
        ) from None


def _show_step(say: Say, recorded: dict[int, StepRecord], record: StepRecord) -> None:
    [step] = compare_steps([recorded[record.step]] if record.step in recorded else [], [record])
    same = "equal" if step.is_equal else f"loss {_number(record.loss)}, grad norm {_number(record.grad_norm)}"
    say(f"step {record.step}: {same}, {record.step_seconds:.1f} s")


def _print_result(
    steps: Sequence[ComparedStep], run: Path, folder: Path, plan: ReplayPlan, changes: list[str], output: str
) -> None:
    if output == "json":
        is_equal = bool(steps) and all(step.is_equal for step in steps)
        values = {"run": str(run), "folder": str(folder), "checkpoint": plan.checkpoint, "missing": list(plan.missing)}
        print_json(
            {"type": "replay", **values, "changes": changes, "is_equal": is_equal, "steps": [*map(to_json, steps)]}
        )
        return
    header = [
        "step",
        *(f"{name} {part}" for name in _SHOWN for part in ("recorded", "replayed", "difference")),
        "weights",
    ]
    show(build_table(header, [_build_row(step) for step in steps]))
    show(describe_result(list(steps)))
    show(f"replay: {folder}")


def _build_row(step: ComparedStep) -> list[str]:
    numbers = (
        _number(value)
        for name in _SHOWN.values()
        for value in (step.recorded.get(name), step.replayed.get(name), step.difference(name))
    )
    weights = {True: "equal", False: "differ", None: "unknown"}[step.has_equal_weights]
    return [str(step.step), *numbers, weights]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
