"""The curves of a run, from its metrics. Pure; the report draws them.

Invariant: an unknown value has no point, so that it cannot be read as zero.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any, TypeVar

from rljob_api.manifest.evaluation import SHORT_FORM
from rljob_api.run.metrics import EvaluationRecord, Metrics, StepRecord
from rljob_cli.run.summary import group_by_set

_Record = TypeVar("_Record", StepRecord, EvaluationRecord)

_MAX_COMPONENTS = 12
_MAX_POINTS = 400
"""Per curve, about: a longer one has one point per 2, 4, 8, ... values, their mean, with the least and the largest.
So a new value changes the last point alone, until the curve has twice as many."""


@dataclass(frozen=True)
class Curve:
    name: str
    points: tuple[tuple[int, float], ...]
    """(step, value), ascending by step."""
    is_held_out: bool = False
    run: str = ""
    """The run that it is of, if runs are laid over each other."""
    ranges: tuple[tuple[float, float], ...] = ()
    """The least and the largest value that each point stands for. Empty: each stands for one."""
    size: int = 1
    """Values that a point stands for."""


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


def invalid_share(step: StepRecord) -> float | None:
    """Return the share of a step's results that were invalid. None: it had no sample."""
    num_results = step.num_samples * max(1, len(step.rewards))
    return step.num_invalid / num_results if num_results else None


_Row = tuple[str, str, Mapping[str, str | Callable[[Any], float | None]]]
"""Title and unit of a panel, and its curves: what each reads of a step, as the path of a field or a function. With ~
before its name, a curve is of the evaluations, one for each set. Shares, whose units begin with `of`, are 0 to 1."""
_ACCURACY: _Row = ("Held-out accuracy", "mean over prompts", {"~accuracy": "accuracy"})
_ROWS: tuple[_Row, ...] = (
    (
        "Completion length",
        "tokens",
        {
            "mean": "response_tokens_mean",
            "longest": "response_tokens_max",
            "~mean, held out": "response_tokens_mean",
        },
    ),
    (
        "Shares",
        "of samples",
        {
            "truncated": "truncated_share",
            "~truncated, held out": "truncated_share",
            "invalid": invalid_share,
            "in groups without signal": "zero_signal_share",
            "tokens clipped": "clip_fraction",
        },
    ),
    ("Loss", "per token", {"loss": "loss"}),
    ("KL to the reference", "nats per token", {"KL": "kl"}),
    ("Critic", "squared error / 2", {"loss": "critic_loss"}),
    ("Entropy", "nats per token", {"entropy": "entropy"}),
    ("Rollout-trainer mismatch", "difference of log-probs", {"mean": "logprob_difference"}),
    ("Mismatch KL", "nats per token", {"KL(rollout || trainer)": "mismatch_kl"}),
    (
        "Importance weights",
        "of tokens",
        {
            "effective sample": "effective_sample_share",
            "corrected": "corrected_share",
            "rejected": "rejected_share",
        },
    ),
    ("Staleness", "steps", {"mean of tokens": "staleness_mean", "oldest token": "staleness_max"}),
    (
        "Prompts in prefix caches",
        "of requests to rollouts",
        {name: methodcaller("prefix_share", name) for name in ("hit", "spilled")},
    ),
    ("Gradient norm", "before clipping", {"norm": "grad_norm"}),
    ("Throughput", "sampled tokens/s", {"tokens/s": "tokens_per_second"}),
    ("Reward latency", "seconds", {"p50": "reward_latency_p50_seconds", "p95": "reward_latency_p95_seconds"}),
)


def build_panels(metrics: Metrics) -> list[Panel]:
    """Return the panels that have points, the most important first."""
    steps, evaluations = metrics.steps, group_by_set(metrics.evaluations)

    def draw(row: _Row) -> Panel:
        title, unit, reads = row
        curves: list[Curve] = []
        for name, read in reads.items():
            read = attrgetter(read) if isinstance(read, str) else read
            if not name.startswith("~"):
                curves.append(_curve(name, steps, read))
                continue
            for of, found in evaluations.items():
                of_set = name[1:] if of == SHORT_FORM else f"{name[1:]}, {of}"
                curves.append(_curve(of_set, found, read, is_held_out=True))
        return Panel(title, unit, tuple(curves), is_share=unit.startswith("of "))

    states = dict.fromkeys(chain.from_iterable(step.device_bytes for step in steps))
    panels = [
        draw(("Reward", "score", {"training": "reward", "~held out": _read("means", "score")})),
        draw(_ACCURACY),
        *(_build_pass_panel(name, found) for name, found in evaluations.items()),
        *(
            draw(
                (
                    f"Component: {name}",
                    "mean",
                    {"training": _read("components", name), "~held out": _read("means", name)},
                )
            )
            for name in list_components(metrics)[:_MAX_COMPONENTS]
        ),
        *map(draw, _ROWS),
        Panel(
            "Seconds per step, by phase", "seconds", _read_parts(steps, attrgetter("phase_seconds")), is_stacked=True
        ),
        Panel("Memory of shared devices", "GiB", tuple(_read_held(name, steps) for name in states)),
        Panel("Roles at work", "of the step's time", _read_parts(steps, attrgetter("busy_shares")), is_share=True),
    ]
    kept = [replace(panel, curves=tuple(curve for curve in panel.curves if curve.points)) for panel in panels]
    return [replace(panel, note=_describe_thinning(panel.curves)) for panel in kept if panel.curves]


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


def _curve(
    name: str, records: Iterable[_Record], read: Callable[[_Record], float | None], *, is_held_out: bool = False
) -> Curve:
    found = ((record.step, read(record)) for record in records)
    known = tuple((step, float(value)) for step, value in found if value is not None and math.isfinite(value))
    return _thin(Curve(name, known, is_held_out))


def _read(part: str, key: str | int) -> Callable[[Any], float | None]:
    """Return what reads one number of a field that has several."""
    return lambda record: getattr(record, part).get(key)


def _build_pass_panel(name: str, found: Sequence[EvaluationRecord]) -> Panel:
    """Return a panel of what several answers to each prompt of a set give. It has no curve with one answer."""
    counts = sorted({k for record in found for k in record.pass_at})
    curves = [_curve(f"pass@{k}", found, _read("pass_at", k), is_held_out=True) for k in counts]
    curves.append(_curve("majority", found, attrgetter("majority"), is_held_out=True))
    return Panel("pass@k" if name == SHORT_FORM else f"pass@k: {name}", "mean over prompts", tuple(curves))


def _read_parts(
    steps: Sequence[StepRecord], read_parts: Callable[[StepRecord], Mapping[str, float]]
) -> tuple[Curve, ...]:
    """Return the parts of a step. A part that a step does not have is 0 in it."""
    known = [step for step in steps if read_parts(step)]
    names = dict.fromkeys(name for step in known for name, value in read_parts(step).items() if value)

    def read(name: str) -> Callable[[StepRecord], float]:
        return lambda step: read_parts(step).get(name, 0.0)

    return tuple(_curve(name, known, read(name)) for name in names)


def _read_held(name: str, steps: Sequence[StepRecord]) -> Curve:
    """Return the memory of shared devices that a state of trainer or rollouts holds."""
    return _curve(name.replace("_", " "), steps, lambda step: step.device_bytes.get(name, math.nan) / 2**30)


def _describe_thinning(curves: Sequence[Curve]) -> str:
    sizes: dict[int, list[str]] = {}
    for curve in curves:
        sizes.setdefault(curve.size, []).append(curve.name)
    return "; ".join(
        f"{', '.join(names) if len(sizes) > 1 else 'each point'}: mean of {size} values, with their range"
        for size, names in sizes.items()
        if size > 1
    )


def _thin(curve: Curve) -> Curve:
    """Thin a curve that is long by itself: an evaluation in each 50th step is a point of its own beside 10,000 steps. A
    point is at a step that the curve has, so that a click leads to the samples of one that it stands for."""
    size = 1 << max(0, math.ceil(len(curve.points) / _MAX_POINTS) - 1).bit_length()
    if size == 1:
        return curve
    chunks = [curve.points[start : start + size] for start in range(0, len(curve.points), size)]
    values = [[y for _, y in chunk] for chunk in chunks]
    points = tuple(
        (chunk[len(chunk) // 2][0], math.fsum(ys) / len(ys)) for chunk, ys in zip(chunks, values, strict=True)
    )
    return replace(curve, points=points, ranges=tuple((min(ys), max(ys)) for ys in values), size=size)
