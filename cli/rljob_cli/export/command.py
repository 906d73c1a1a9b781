"""`rljob export`: from a run's folder, which may belong to a run that failed, was stopped or is in progress, or from a
job in a cluster, to a folder, to object storage or to the Hub.

Of a job in a cluster, the model of the step is copied first: an export if there is one, else the checkpoint.

Invariants: a place that refuses the model says so before the model is built; the model card has selected fields of the
job alone. Variables of environments, sources of functions and paths of this machine stay out: a card is published.
"""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Protocol

from rljob_api.errors import UserError
from rljob_api.manifest.sources import parse_source
from rljob_api.run.folder import FILE_JOB, FILE_METRICS
from rljob_api.run.metrics import EvaluationRecord, Metrics, read_metrics
from rljob_api.run.summaries import RunSummary
from rljob_cli.cluster.other_versions import parse_job
from rljob_cli.export.steps import export_step, is_step, read_step
from rljob_cli.options import ExportOptions
from rljob_cli.output import print_json, say
from rljob_cli.report.collect import name_run, read_job, read_summary
from rljob_cli.run.runfolder import dump
from rljob_cli.run.summary import build_serve_command
from rljob_cli.trajectories.log import find_run
from rljob_inputs.hub import HubAccess, require_private, upload_model
from rljob_inputs.machine.installation import require
from rljob_inputs.objects.access import is_object
from rljob_inputs.objects.folder import require_empty, upload_folder

FILE_CARD = "README.md"
_USE = "`vllm serve FOLDER` serves it; transformers loads it with `AutoModelForCausalLM.from_pretrained(FOLDER)`."


def build_card(name: str, step: int, job: Mapping[str, Any], metrics: Metrics, summary: RunSummary) -> str:
    """Return the card of a step's model. `job`: the manifest of the run. Records of later steps are left out."""
    spec = job.get("spec") or {}
    base = _describe_source(_get(spec, "model", "source"), _get(spec, "model", "revision") or summary.model_commit)
    parts = [
        _build_header(spec),
        f"# {name}, step {step}\n\nTrained from {base} by reinforcement learning with RLJob.",
        _USE,
        _section("Training", ["", ""], [*_list_settings(spec, step, summary), *_list_results(metrics, step)]),
        _section("Rewards", ["reward", "kind", "weight", "use"], map(_describe_reward, spec.get("rewards") or [])),
        _section("Versions", ["package", "version"], sorted(find_versions(summary).items())),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _build_header(spec: Mapping[str, Any]) -> str:
    """Return the metadata that the Hub reads: only what it can resolve."""
    lines = ["library_name: transformers", "pipeline_tag: text-generation", "tags: [rljob, reinforcement-learning]"]
    if (source := str(_get(spec, "model", "source"))).startswith("hf://"):
        lines.insert(0, f"base_model: {json.dumps(source.removeprefix('hf://'))}")
    if names := [each.removeprefix("hf://") for each in _list_sources(spec) if each.startswith("hf://")]:
        lines.append(f"datasets: {json.dumps(names)}")
    return "\n".join(["---", *lines, "---"])


def _list_sources(spec: Mapping[str, Any]) -> list[str]:
    data = spec.get("data") or {}
    found = [data.get("train"), *(data.get("mix") or [])]
    return list(dict.fromkeys(str(each["source"]) for each in found if each and each.get("source")))


def _list_settings(spec: Mapping[str, Any], step: int, summary: RunSummary) -> Iterator[tuple[str, ...]]:
    algorithm, schedule = spec.get("algorithm") or {}, spec.get("schedule") or {}
    optimizer = algorithm.get("optimizer") or {}
    yield "data", ", ".join(map(_describe_source, _list_sources(spec)))
    yield "step", f"{step} of {schedule.get('steps', summary.total_steps)}"
    yield "algorithm", str(algorithm.get("type", ""))
    yield "samples of a step", f"{schedule.get('promptsPerStep')} prompts, {algorithm.get('groupSize')} samples each"
    yield "schedule", str(schedule.get("type", ""))
    yield "learning rate", f"{optimizer.get('learningRate')}, {optimizer.get('schedule')}"
    yield "KL coefficient", str(_get(algorithm, "kl", "coefficient"))
    yield "temperature", str(_get(spec, "rollout", "sampling", "temperature"))
    if lora := _get(spec, "trainer", "lora"):
        yield "LoRA", f"rank {lora.get('rank')}, alpha {lora.get('alpha')}; merged here"
    yield "agent", str(_get(spec, "agent", "type") or "")
    yield "seed", str(schedule.get("seed"))


def _describe_reward(reward: Mapping[str, Any]) -> tuple[str, ...]:
    kind = next((each for each in ("function", "judge", "model", "http", "teacher") if reward.get(each)), "")
    return str(reward.get("name", "")), kind, str(reward.get("weight", "")), str(reward.get("use", ""))


def _list_results(metrics: Metrics, step: int) -> Iterator[tuple[str, str]]:
    """Yield the reward of the step, and the last accuracy of each evaluation set."""
    rewards = {each.step: each.reward for each in metrics.steps}
    yield "mean reward", _number(rewards.get(step))
    last = {each.set: each for each in metrics.evaluations if each.step <= step}
    yield from ((f"accuracy, {name}, after step {found.step}", _accuracy(found)) for name, found in last.items())


def _accuracy(found: EvaluationRecord) -> str:
    bounds = found.accuracy_low, found.accuracy_high
    shown = "" if None in bounds else f" [{_number(bounds[0])}, {_number(bounds[1])}]"
    return _number(found.accuracy) + shown


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def find_versions(summary: RunSummary) -> dict[str, str]:
    """Return the versions of the last session that knows them, or of the driver."""
    of_sessions = (session.versions for session in reversed(summary.sessions))
    return next(filter(None, of_sessions), {}) | summary.versions


def _describe_source(source: Any, revision: Any = None) -> str:
    """Return a source as a reader elsewhere can use it: of a local folder or file, or of objects, the name alone."""
    text = str(source)
    if text.startswith("env://"):
        return f"rows of the agent's environment or program, {text.removeprefix('env://')}"
    if text.startswith("hf://"):
        name = text.removeprefix("hf://")
        return f"{name}{f' at {revision}' if revision else ''}"
    return f"{PurePath(text).name} ({'object storage' if is_object(text) else 'local'})"


def _section(title: str, header: Sequence[str], rows: Any) -> str:
    """Return a section with a table; empty without rows."""
    lines = [f"| {' | '.join(map(_escape, row))} |" for row in rows if any(row[1:])]
    if not lines:
        return ""
    return "\n".join([f"## {title}", f"| {' | '.join(header)} |", "|" + "---|" * len(header), *lines])


def _escape(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _get(found: Any, *names: str) -> Any:
    for name in names:
        found = (found or {}).get(name)
    return found


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


def export_command(options: ExportOptions) -> int:
    """Write the model of a step and its card to `to`: a folder, which exists only once the model in it is complete, or
    the URL of objects or of a repository. With a target, the run is that of a job in a cluster."""
    run, name, to, output, target = options.run, options.step, options.to, options.output, options.target
    if not target:
        require("rljob export")
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
    return write_card(folder, step, to)


def write_card(folder: Path, step: int, to: Path) -> tuple[str, Mapping[str, Any]]:
    """Write the card of a run's model into its folder. Return as _write_model."""
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
