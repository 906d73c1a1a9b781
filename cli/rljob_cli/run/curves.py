"""The curves of a run, from its metrics. Pure; the report draws them.

Invariant: an unknown value has no point, so that it cannot be read as zero.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from operator import attrgetter, methodcaller
from typing import TypeVar

from rljob_api.manifest.evaluation import SHORT_FORM
from rljob_api.run.metrics import EvaluationRecord, Metrics, StepRecord
from rljob_cli.run.summary import group_by_set

_Record = TypeVar("_Record", StepRecord, EvaluationRecord)

_MAX_COMPONENTS = 12
_MAX_POINTS = 400
"""Per curve. Longer runs have one point per several steps, their mean."""


@dataclass(frozen=True)
class Curve:
    name: str
    points: tuple[tuple[float, float], ...]
    """(step, value), ascending by step."""
    is_held_out: bool = False
    run: str = ""
    """The run that it is of, if runs are laid over each other."""


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    curves: tuple[Curve, ...]
    is_stacked: bool = False
    """The curves add up: draw them on top of each other. All have the same steps."""
    is_share: bool = False
    """From 0 to 1."""
    note: str = ""


def build_panels(metrics: Metrics) -> list[Panel]:
    """Return the panels that have points, the most important first."""
    steps, evaluations = metrics.steps, group_by_set(metrics.evaluations)

    def train(name: str, read: Callable[[StepRecord], float | None]) -> Curve:
        return _curve(name, steps, read)

    def held_out(read: Callable[[EvaluationRecord], float | None], name: str = "held out") -> tuple[Curve, ...]:
        return tuple(
            _curve(name if of == SHORT_FORM else f"{name}, {of}", found, read, is_held_out=True)
            for of, found in evaluations.items()
        )

    def component(name: str) -> tuple[Curve, ...]:
        return train("training", lambda step: step.components.get(name)), *held_out(lambda found: found.means.get(name))

    panels = [
        Panel("Reward", "score", (train("training", attrgetter("reward")), *component("score")[1:])),
        Panel("Held-out accuracy", "mean over prompts", held_out(attrgetter("accuracy"), "accuracy")),
        *(_build_pass_panel(name, found) for name, found in evaluations.items()),
    ]
    names = list_components(metrics)[:_MAX_COMPONENTS]
    states = dict.fromkeys(chain.from_iterable(step.device_bytes for step in steps))
    panels += [Panel(f"Component: {name}", "mean", component(name)) for name in names]
    panels += [
        Panel(
            "Completion length",
            "tokens",
            (
                train("mean", attrgetter("response_tokens_mean")),
                train("longest", attrgetter("response_tokens_max")),
                *held_out(attrgetter("response_tokens_mean"), "mean, held out"),
            ),
        ),
        Panel(
            "Shares",
            "of samples",
            (
                train("truncated", attrgetter("truncated_share")),
                *held_out(attrgetter("truncated_share"), "truncated, held out"),
                train("invalid", invalid_share),
                train("in groups without signal", attrgetter("zero_signal_share")),
                train("tokens clipped", attrgetter("clip_fraction")),
            ),
            is_share=True,
        ),
        Panel("KL to the reference", "nats per token", (train("KL", attrgetter("kl")),)),
        Panel("Critic", "squared error / 2", (train("loss", attrgetter("critic_loss")),)),
        Panel("Entropy", "nats per token", (train("entropy", attrgetter("entropy")),)),
        Panel(
            "Rollout-trainer mismatch",
            "difference of log-probs",
            (train("mean", attrgetter("logprob_difference")),),
        ),
        Panel("Mismatch KL", "nats per token", (train("KL(rollout || trainer)", attrgetter("mismatch_kl")),)),
        Panel(
            "Importance weights",
            "of tokens",
            (
                train("effective sample", attrgetter("effective_sample_share")),
                train("corrected", attrgetter("corrected_share")),
                train("rejected", attrgetter("rejected_share")),
            ),
            is_share=True,
        ),
        Panel(
            "Staleness",
            "steps",
            (
                train("mean of tokens", attrgetter("staleness_mean")),
                train("oldest token", attrgetter("staleness_max")),
            ),
        ),
        Panel(
            "Prompts in prefix caches",
            "of requests to rollouts",
            tuple(train(name, methodcaller("prefix_share", name)) for name in ("hit", "spilled")),
            is_share=True,
        ),
        Panel("Gradient norm", "before clipping", (train("norm", attrgetter("grad_norm")),)),
        Panel("Throughput", "sampled tokens/s", (train("tokens/s", attrgetter("tokens_per_second")),)),
        Panel(
            "Reward latency",
            "seconds",
            (
                train("p50", attrgetter("reward_latency_p50_seconds")),
                train("p95", attrgetter("reward_latency_p95_seconds")),
            ),
        ),
        _stacked_panel("Seconds per step, by phase", "seconds", steps, lambda step: step.phase_seconds),
        Panel("Memory of shared devices", "GiB", tuple(_read_held(name, steps) for name in states)),
        # The shares overlap, so their sum is the mean number of roles that work at the same time.
        _stacked_panel("Roles at work", "share of the step, added up", steps, lambda step: step.busy_shares),
    ]
    kept = [replace(panel, curves=tuple(curve for curve in panel.curves if curve.points)) for panel in panels]
    return [_thin(panel) for panel in kept if panel.curves]


def lay_over(runs: Mapping[str, Sequence[Panel]]) -> list[Panel]:
    """Return panels with the curves of several runs, each behind the name of its run. What is stacked in a panel cannot
    be compared like that: such panels are of the first run."""
    first, titles = next(iter(runs)), dict.fromkeys(panel.title for panels in runs.values() for panel in panels)
    found = []
    for title in titles:
        own = {run: panel for run, panels in runs.items() for panel in panels if panel.title == title}
        sample = next(iter(own.values()))
        if not sample.is_stacked:
            curves = tuple(
                replace(curve, name=f"{run}: {curve.name}", run=run)
                for run, panel in own.items()
                for curve in panel.curves
            )
            notes = dict.fromkeys(filter(None, (panel.note for panel in own.values())))
            found.append(replace(sample, curves=curves, note="; ".join(notes)))
        elif first in own:
            found.append(replace(own[first], note="; ".join(filter(None, [own[first].note, f"of {first} alone"]))))
    return found


def list_components(metrics: Metrics) -> list[str]:
    """Return the components of all rewards in order of appearance, without the score itself."""
    found = [*(record.means for record in metrics.evaluations), *(step.components for step in metrics.steps)]
    return [name for name in dict.fromkeys(chain.from_iterable(found)) if name != "score"]


def invalid_share(step: StepRecord) -> float | None:
    """Return the share of a step's results that were invalid. None: it had no sample."""
    num_results = step.num_samples * max(1, len(step.rewards))
    return step.num_invalid / num_results if num_results else None


def _curve(
    name: str, records: Iterable[_Record], read: Callable[[_Record], float | None], *, is_held_out: bool = False
) -> Curve:
    found = [(record.step, read(record)) for record in records]
    known = tuple((float(step), float(value)) for step, value in found if value is not None and math.isfinite(value))
    return Curve(name, known, is_held_out)


def _read_pass(k: int, record: EvaluationRecord) -> float | None:
    return record.pass_at.get(k)


def _build_pass_panel(name: str, found: Sequence[EvaluationRecord]) -> Panel:
    """Return a panel of what several answers to each prompt of a set give. It has no curve with one answer."""
    counts = sorted({k for record in found for k in record.pass_at})
    curves = [_curve(f"pass@{k}", found, partial(_read_pass, k), is_held_out=True) for k in counts]
    curves.append(_curve("majority", found, attrgetter("majority"), is_held_out=True))
    return Panel("pass@k" if name == SHORT_FORM else f"pass@k: {name}", "mean over prompts", tuple(curves))


def _stacked_panel(
    title: str, unit: str, steps: Sequence[StepRecord], read_parts: Callable[[StepRecord], Mapping[str, float]]
) -> Panel:
    """Return a panel of the parts of a step. A part that a step does not have is 0 in it."""
    known = [step for step in steps if read_parts(step)]
    names = dict.fromkeys(name for step in known for name, value in read_parts(step).items() if value)

    def read(name: str) -> Callable[[StepRecord], float]:
        return lambda step: read_parts(step).get(name, 0.0)

    return Panel(title, unit, tuple(_curve(name, known, read(name)) for name in names), is_stacked=True)


def _read_held(name: str, steps: Sequence[StepRecord]) -> Curve:
    """Return the memory of shared devices that a state of trainer or rollouts holds."""
    return _curve(name.replace("_", " "), steps, lambda step: step.device_bytes.get(name, math.nan) / 2**30)


def _thin(panel: Panel) -> Panel:
    longest = max(len(curve.points) for curve in panel.curves)
    size = math.ceil(longest / _MAX_POINTS)
    if size == 1:
        return panel
    curves = tuple(Curve(c.name, _average(c.points, size), c.is_held_out) for c in panel.curves)
    return replace(panel, curves=curves, note=f"each point: mean of {size} steps")


def _average(points: Sequence[tuple[float, float]], size: int) -> tuple[tuple[float, float], ...]:
    chunks = [points[start : start + size] for start in range(0, len(points), size)]
    return tuple(
        (math.fsum(x for x, _ in some) / len(some), math.fsum(y for _, y in some) / len(some)) for some in chunks
    )
