"""The model card of an export: README.md, as the Hub shows it, from a run's own records. Pure.

Invariant: of the job it has selected fields alone. Variables of environments, sources of functions and paths of this
machine stay out: a card is published.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from rljob_api.run.metrics import EvaluationRecord, Metrics
from rljob_api.run.summaries import RunSummary
from rljob_inputs.objects.access import is_object

FILE_CARD = "README.md"
_MAX_ROWS = 12
"""Limit of the curves: evaluations come first, then steps at even distances."""


def build_card(name: str, step: int, job: Mapping[str, Any], metrics: Metrics, summary: RunSummary) -> str:
    """Return the card of a step's model. `job`: the manifest of the run. Records of later steps are left out."""
    spec = job.get("spec") or {}
    base = _describe_source(_get(spec, "model", "source"), _get(spec, "model", "revision") or summary.model_commit)
    parts = [
        _build_header(spec),
        f"# {name}, step {step}\n\nTrained from {base} by reinforcement learning with RLJob.",
        _section("Training", ["", ""], _list_settings(spec, step, summary)),
        _section("Rewards", ["reward", "kind", "weight", "use"], map(_describe_reward, spec.get("rewards") or [])),
        _section("Curves", *_build_curves(metrics, step)),
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
    kind = next((each for each in ("function", "judge", "model", "http") if reward.get(each)), "")
    return str(reward.get("name", "")), kind, str(reward.get("weight", "")), str(reward.get("use", ""))


def _build_curves(metrics: Metrics, step: int) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return the header and the rows: the mean reward of a step, and the accuracy of each evaluation set after it."""
    rewards = {each.step: each.reward for each in metrics.steps if each.step <= step}
    evaluations = {(each.step, each.set): each for each in metrics.evaluations if each.step <= step}
    sets = list(dict.fromkeys(name for _, name in evaluations))
    shown = _choose(sorted({at for at, _ in evaluations}), _MAX_ROWS)
    others = [at for at in sorted(rewards) if at not in shown]
    shown = sorted({*shown, *_choose(others, _MAX_ROWS - len(shown))})
    rows = [
        (str(at), _number(rewards.get(at)), *(_accuracy(evaluations.get((at, name))) for name in sets)) for at in shown
    ]
    return ["step", "reward", *(f"accuracy, {name}" for name in sets)], rows


def _choose(values: Sequence[int], count: int) -> list[int]:
    """Return at most `count` values at even distances, the first and the last among them."""
    if count <= 1 or len(values) <= count:
        return list(values[-count:]) if count > 0 else []
    return [values[index * (len(values) - 1) // (count - 1)] for index in range(count)]


def _accuracy(found: EvaluationRecord | None) -> str:
    if found is None or found.accuracy is None:
        return ""
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
