"""The curves of a run, from the rows of metrics.jsonl. Pure; curves.png and the report draw the same panels.

Invariant: an unknown value has no point, so that it cannot be read as zero.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rljob_cli.run.runfolder import Row, split_rows

_MAX_COMPONENTS = 12
_MAX_POINTS = 400
"""Per curve. Longer runs have one point per several steps, their mean."""


@dataclass(frozen=True)
class Curve:
    name: str
    points: tuple[tuple[float, float], ...]
    """(step, value), ascending by step."""
    is_held_out: bool = False


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


def build_panels(rows: list[Row]) -> list[Panel]:
    """Return the panels that have points, the most important first."""
    steps, evals = split_rows(rows)

    def train(key: str, name: str) -> Curve:
        return _curve(name, steps, lambda row: row.get(key))

    def held_out(read: Callable[[Row], Any], name: str = "held out") -> Curve:
        return _curve(name, evals, read, is_held_out=True)

    panels = [
        Panel("Reward", "score", (train("reward", "training"), held_out(lambda row: _component(row, "score")))),
        Panel("Held-out accuracy", "mean", (held_out(lambda row: row.get("accuracy"), "accuracy"),)),
    ]
    for component in list_components(rows)[:_MAX_COMPONENTS]:
        both = (
            _curve("training", steps, lambda row, name=component: _component(row, name)),  # type: ignore[misc]
            held_out(lambda row, name=component: _component(row, name)),  # type: ignore[misc]
        )
        panels.append(Panel(f"Component: {component}", "mean", both))
    panels += [
        Panel(
            "Completion length",
            "tokens",
            (
                train("response_tokens_mean", "mean"),
                train("response_tokens_max", "longest"),
                held_out(lambda row: row.get("response_tokens_mean"), "mean, held out"),
            ),
        ),
        Panel(
            "Shares",
            "of samples",
            (
                train("truncated_share", "truncated"),
                held_out(lambda row: row.get("truncated_share"), "truncated, held out"),
                _curve("invalid", steps, invalid_share),
                train("zero_signal_share", "in groups without signal"),
                train("clip_fraction", "tokens clipped"),
            ),
            is_share=True,
        ),
        Panel("KL to the reference", "nats per token", (train("kl", "KL"),)),
        Panel("Critic", "squared error / 2", (train("critic_loss", "loss"),)),
        Panel("Entropy", "nats per token", (train("entropy", "entropy"),)),
        Panel(
            "Rollout-trainer mismatch",
            "difference of log-probs",
            (train("logprob_difference", "mean"),),
        ),
        Panel("Mismatch KL", "nats per token", (train("mismatch_kl", "KL(rollout || trainer)"),)),
        Panel(
            "Importance weights",
            "of tokens",
            (train("effective_sample_share", "effective sample"), train("corrected_share", "corrected")),
            is_share=True,
        ),
        Panel(
            "Staleness", "steps", (train("staleness_mean", "mean of tokens"), train("staleness_max", "oldest token"))
        ),
        Panel("Gradient norm", "before clipping", (train("grad_norm", "norm"),)),
        Panel("Throughput", "sampled tokens/s", (train("tokens_per_second", "tokens/s"),)),
        Panel(
            "Reward latency",
            "seconds",
            (train("reward_latency_p50_seconds", "p50"), train("reward_latency_p95_seconds", "p95")),
        ),
        _stacked_panel("Seconds per step, by phase", "seconds", steps, "phase_seconds"),
        # The shares overlap, so their sum is the mean number of roles that work at the same time.
        _stacked_panel("Roles at work", "share of the step, added up", steps, "busy_shares"),
    ]
    kept = [_keep_known(panel) for panel in panels]
    return [_thin(panel) for panel in kept if panel.curves]


def list_components(rows: Iterable[Row]) -> list[str]:
    """Return the components of all rewards in order of appearance, without the score itself."""
    found = [name for row in rows for name in (row.get("components") or row.get("means") or {})]
    return [name for name in dict.fromkeys(found) if name != "score"]


def invalid_share(row: Row) -> float | None:
    """Return the share of a step's results that were invalid. None: it had no sample."""
    num_results = (row.get("num_samples") or 0) * max(1, len(row.get("rewards") or {}))
    return (row.get("num_invalid") or 0) / num_results if num_results else None


def _component(row: Row, name: str) -> Any:
    return (row.get("components") or row.get("means") or {}).get(name)


def _curve(name: str, rows: Iterable[Row], read: Callable[[Row], Any], *, is_held_out: bool = False) -> Curve:
    found = [(row["step"], read(row)) for row in rows]
    known = tuple((float(step), float(value)) for step, value in found if _is_number(value))
    return Curve(name, known, is_held_out)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _stacked_panel(title: str, unit: str, steps: Sequence[Row], key: str) -> Panel:
    """Return a panel of the parts of `row[key]`. A part that a step does not have is 0 in it."""
    known = [row for row in steps if row.get(key)]
    names = dict.fromkeys(name for row in known for name, value in row[key].items() if value)

    def read(name: str) -> Callable[[Row], float]:
        return lambda row: row[key].get(name, 0.0)

    return Panel(title, unit, tuple(_curve(name, known, read(name)) for name in names), is_stacked=True)


def _keep_known(panel: Panel) -> Panel:
    curves = tuple(curve for curve in panel.curves if curve.points)
    return Panel(panel.title, panel.unit, curves, panel.is_stacked, panel.is_share, panel.note)


def _thin(panel: Panel) -> Panel:
    longest = max(len(curve.points) for curve in panel.curves)
    size = math.ceil(longest / _MAX_POINTS)
    if size == 1:
        return panel
    curves = tuple(Curve(c.name, _average(c.points, size), c.is_held_out) for c in panel.curves)
    return Panel(panel.title, panel.unit, curves, panel.is_stacked, panel.is_share, f"each point: mean of {size} steps")


def _average(points: Sequence[tuple[float, float]], size: int) -> tuple[tuple[float, float], ...]:
    chunks = [points[start : start + size] for start in range(0, len(points), size)]
    return tuple(
        (math.fsum(x for x, _ in some) / len(some), math.fsum(y for _, y in some) / len(some)) for some in chunks
    )
