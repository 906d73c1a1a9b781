"""What each role did when: the events of bench/overlap/timeline_head.py, as curves and as a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROLES = ("rollouts", "rewards", "trainer")
_COLOURS = {"rollouts": "#3182bd", "rewards": "#e6550d", "trainer": "#31a354"}
_MIN_GAP_SECONDS = 0.05
"""Shorter idle times are not drawn: a pixel is wider."""


class Timeline(NamedTuple):
    label: str
    path: Path
    """Path of timeline.jsonl."""
    step_ends: Sequence[float]
    """When each step to draw ended, in seconds since the epoch; the first one is the start of the picture."""


def find_busy_intervals(path: Path) -> dict[str, list[tuple[float, float]]]:
    """Return when each role worked, in seconds since the epoch: the union of its overlapping pieces of work."""
    active = dict.fromkeys(ROLES, 0)
    intervals: dict[str, list[tuple[float, float]]] = {role: [] for role in ROLES}
    begins: dict[str, float] = {}
    for at, role, change in sorted(map(json.loads, path.read_text().splitlines()), key=lambda event: event[0]):
        if active[role] == 0:
            begins[role] = at
        active[role] += change
        if active[role] == 0:
            _append(intervals[role], begins[role], at)
    return intervals


def _append(intervals: list[tuple[float, float]], begin: float, end: float) -> None:
    if intervals and begin - intervals[-1][1] < _MIN_GAP_SECONDS:
        begin = intervals.pop()[0]
    intervals.append((begin, end))


def busy_shares(path: Path, begin: float, end: float) -> dict[str, float]:
    """Return the share of [begin, end] in which each role worked."""
    return {
        role: sum(max(0.0, min(last, end) - max(first, begin)) for first, last in found) / (end - begin)
        for role, found in find_busy_intervals(path).items()
    }


def draw(timelines: Sequence[Timeline], path: Path, ratios: Mapping[str, float]) -> None:
    """Draw one row per variant, all with the same scale, with a vertical line at the end of each step."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(len(timelines), 1, figsize=(13, 1.35 * len(timelines)), sharex=True, squeeze=False)
    for axis, timeline in zip(axes.flat, timelines, strict=True):
        start, end = timeline.step_ends[0], timeline.step_ends[-1]
        for height, role in enumerate(reversed(ROLES)):
            found = find_busy_intervals(timeline.path)[role]
            bars = [(max(first, start) - start, min(last, end) - max(first, start)) for first, last in found]
            axis.broken_barh([bar for bar in bars if bar[1] > 0], (height + 0.1, 0.8), color=_COLOURS[role], lw=0)
        for step_end in timeline.step_ends:
            axis.axvline(step_end - start, color="#636363", lw=0.8, ls=":")
        shares = busy_shares(timeline.path, start, end)
        work = ", ".join(f"{role} {shares[role]:.0%}" for role in ROLES)
        ratio = f": {ratios[timeline.label]:.2f} x its floor" if timeline.label in ratios else ""
        axis.set_title(f"{timeline.label}{ratio}   ({work})", loc="left", fontsize=8.5)
        axis.set_yticks([0.5, 1.5, 2.5], reversed(ROLES), fontsize=7)
        axis.set_ylim(0, 3)
    axes.flat[-1].set_xlabel("seconds; dotted: the end of a step")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
