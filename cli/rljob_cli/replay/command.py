"""`rljob run --from-trajectories`: checks the run and the job, replays the steps, and prints what differs.

The head of a replay has another program, beside the trainers: no rollouts and no services run. Invariant: when
`run_replay` returns or raises, no process that it started is alive.
"""

import asyncio
import functools
import json
import math
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rljob_api.errors import TransientError, UserError
from rljob_api.manifest.job import RLJob, RLJobSpec
from rljob_api.run.folder import FILE_JOB, FILE_METRICS, TRAJECTORIES, complete_checkpoints, list_trajectory_files
from rljob_api.run.metrics import StepRecord, read_metrics
from rljob_api.wire.contract import LABEL_ROLE, ExitCode
from rljob_cli.check.job_source import require_weights
from rljob_cli.check.jobfile import load
from rljob_cli.check.waits import find_ended_container
from rljob_cli.commands import parse_claims, use_fast_types
from rljob_cli.exits import EXIT_INTERRUPTED, guard
from rljob_cli.local.cluster import STOP_SECONDS, LocalCluster, build_objects, running
from rljob_cli.local.network import Network, claim_block
from rljob_cli.manifests import labels_of, role_of
from rljob_cli.options import RunOptions
from rljob_cli.output import Say, print_json
from rljob_cli.replay.compatibility import find_changes, find_obstacles
from rljob_cli.replay.plan import ReplayPlan, StepRange, parse_steps, plan_replay
from rljob_cli.run import runfolder
from rljob_cli.run.runfolder import MetricsReader
from rljob_cli.tables import build_table, choose_console, print_lines_on, show
from rljob_cli.trajectories.log import find_run
from rljob_core.backend import Manifest
from rljob_core.children.common import HEAD, TRAINER
from rljob_core.plan.observed_job import name_of
from rljob_inputs.machine.installation import find_device_extra, require

_SETTINGS = "replay.json"
_KINDS = ("Secret", "ConfigMap", "Service", "StatefulSet", "Job")
_POLL_SECONDS = 0.2

Show = Callable[[StepRecord], None]


def run_replay(
    job: RLJob,
    run: Path,
    plan: ReplayPlan,
    folder: Path,
    network: Network,
    claims: Mapping[str, Path],
    show: Show,
) -> None:
    """Train on the steps of `run`; the records are then in `folder`. `show` gets each step when it has ended. Raise the
    error that ends the program."""
    settings = {"run": str(run), "checkpoint": plan.checkpoint, "steps": list(plan.steps)}
    (folder / _SETTINGS).write_text(json.dumps(settings))
    job = job.model_copy(update={"spec": separate(job.spec)})
    asyncio.run(_run(LocalCluster(job, network, folder, claims), list_objects(job), folder, show))


def list_objects(job: RLJob) -> list[Manifest]:
    """Return the job's objects without rollouts and services. The head's Pod has another program."""

    def keeps(child: Manifest) -> bool:
        return labels_of(child).get(LABEL_ROLE, HEAD) in (HEAD, TRAINER)

    return build_objects(job, _KINDS, f"rljob_trainer.replay {_SETTINGS}", keeps)


def separate(spec: RLJobSpec) -> RLJobSpec:
    """Return the spec without engines in the trainer's Pods, which a replay does not ask."""
    spec = spec.model_copy(deep=True)
    for model in spec.models_in_trainer.values():
        model.placement = "separate"
    spec.rollout.placement, spec.rollout.weight_transfer = "separate", "file"
    return spec


async def _run(cluster: LocalCluster, objects: Sequence[Manifest], folder: Path, show: Show) -> None:
    reader, shown, has_ended = MetricsReader(folder / FILE_METRICS), 0, False  # the last step that was shown
    async with running(cluster, objects, STOP_SECONDS, signals=(signal.SIGTERM, signal.SIGHUP)):
        while not has_ended:
            has_ended = _has_ended(cluster)
            for record in [each for each in reader.read().steps if each.step > shown]:
                show(record)
                shown = record.step
            await asyncio.sleep(0 if has_ended else _POLL_SECONDS)


def _has_ended(cluster: LocalCluster) -> bool:
    """Whether the program has succeeded. Raise why it or a trainer ended, unless another attempt may help: the head's
    Job and the trainers' StatefulSet then start one."""
    cluster.check()
    [head] = cluster.store.of_kind("Job")
    if (head.get("status") or {}).get("succeeded"):
        return True
    for pod in cluster.store.pods.values():
        if ended := find_ended_container(pod):
            message = (ended["message"] or "it printed nothing").strip().removeprefix("error: ")
            if ended["exitCode"] == ExitCode.USER:
                raise UserError(message)
            if role_of(pod) == HEAD and (head.get("status") or {}).get("conditions"):
                raise TransientError(f"{name_of(pod)} ended with exit code {ended['exitCode']}: {message}")
    return False


NUMBERS = (
    *("loss", "policy_loss", "grad_norm", "kl", "entropy", "clip_fraction", "corrected_share", "rejected_share"),
    *("effective_sample_share", "critic_loss", "logprob_difference", "mismatch_kl", "mismatch_max", "learning_rate"),
    *("num_tokens", "trained_share", "num_skipped_updates", "reward", "zero_signal_share"),
)
"""Fields of StepRecord that follow from rows, weights and code alone."""


@dataclass(frozen=True)
class ComparedStep:
    step: int
    recorded: Mapping[str, float | None]
    """By name in NUMBERS; empty: metrics.jsonl of the run has no such step."""
    replayed: Mapping[str, float | None]
    has_equal_weights: bool | None
    """Whether the weights after the step are equal, bit by bit. None: the run has no digest."""

    @property
    def is_equal(self) -> bool:
        """Whether all numbers, and the weights if they are known, are exactly those of the run."""
        return self.has_equal_weights is not False and self.recorded == self.replayed

    def difference(self, name: str) -> float | None:
        """Return the replayed number minus the recorded one; None if one is unknown."""
        before, now = self.recorded.get(name), self.replayed.get(name)
        return None if before is None or now is None else now - before

    @property
    def largest_difference(self) -> float:
        """The largest difference of a number, relative to the recorded one."""
        pairs = [(self.recorded[name], self.difference(name)) for name in self.recorded]
        shares = (abs(found) / max(abs(before or 0.0), 1e-12) for before, found in pairs if found)
        return max(shares, default=math.inf if self._differs_in_presence else 0.0)

    @property
    def _differs_in_presence(self) -> bool:
        return any((self.recorded[name] is None) != (self.replayed.get(name) is None) for name in self.recorded)


def compare_steps(recorded: Iterable[StepRecord], replayed: Iterable[StepRecord]) -> list[ComparedStep]:
    """Return the replayed steps, each with its recorded numbers."""
    before = {record.step: record for record in recorded}
    return [_compare(before.get(record.step), record) for record in replayed]


def _compare(before: StepRecord | None, now: StepRecord) -> ComparedStep:
    known = bool(before and before.weight_digest and now.weight_digest)
    return ComparedStep(
        step=now.step,
        recorded={} if before is None else _numbers(before),
        replayed=_numbers(now),
        has_equal_weights=before.weight_digest == now.weight_digest if before is not None and known else None,
    )


def _numbers(record: StepRecord) -> dict[str, float | None]:
    return {name: getattr(record, name) for name in NUMBERS}


def describe_result(steps: list[ComparedStep]) -> str:
    """Return what the comparison says, in one line."""
    different = [step for step in steps if not step.is_equal]
    if not different:
        has_weights = all(step.has_equal_weights for step in steps)
        return "equal to the run: all numbers" + (", and the weights bit by bit" if has_weights else "")
    first = different[0]
    if not first.recorded:
        return f"step {first.step} is not in metrics.jsonl of the run: there is nothing to compare it with"
    return f"differs from the run, first in step {first.step}: by up to {first.largest_difference:.2g} of a number"


def to_json(step: ComparedStep) -> dict[str, Any]:
    return {
        "step": step.step,
        "is_equal": step.is_equal,
        "has_equal_weights": step.has_equal_weights,
        "recorded": dict(step.recorded),
        "replayed": dict(step.replayed),
        "difference": {name: step.difference(name) for name in step.replayed},
    }


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
