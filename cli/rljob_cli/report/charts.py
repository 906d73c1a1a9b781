"""What the page draws of panels, as data, and what of it a page does not have. Pure.

The page draws with uPlot, whose released files are in the template's folder. Invariants: a step is exact; a value has
six digits.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rljob_cli.run.curves import Curve, Panel

_POINTS = ("x", "y", "low", "high")
Chart = dict[str, Any]
"""A panel: with its curves, whose points are lists of the same length; low and high may be empty."""


def describe_panels(panels: Iterable[Panel]) -> list[Chart]:
    return [
        {
            "title": panel.title,
            "unit": panel.unit,
            "note": panel.note,
            "stacked": panel.is_stacked,
            "share": panel.is_share,
            "curves": list(map(_describe, panel.curves)),
        }
        for panel in panels
    ]


def _describe(curve: Curve) -> dict[str, Any]:
    lists = {
        "x": [step for step, _ in curve.points],
        "y": [_round(value) for _, value in curve.points],
        "low": [_round(low) for low, _ in curve.ranges],
        "high": [_round(high) for _, high in curve.ranges],
    }
    return {"name": curve.name, "run": curve.run, "eval": curve.is_held_out, **lists}


def _round(value: float) -> float:
    return float(f"{value:.6g}")


def find_tails(before: Sequence[Chart], now: Sequence[Chart]) -> list[Chart]:
    """Return the charts with the points of each curve from the first one that differs, whose place is `from`."""
    known = {(chart["title"], curve["name"]): curve for chart in before for curve in chart["curves"]}
    return [
        chart | {"curves": [_cut(curve, known.get((chart["title"], curve["name"]), {})) for curve in chart["curves"]]}
        for chart in now
    ]


def _cut(curve: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    columns = [
        list(zip(*(each.get(name) or each.get("x", ()) for name in _POINTS), strict=True)) for each in (known, curve)
    ]
    pairs = zip(*columns, strict=False)
    first = next((place for place, (old, new) in enumerate(pairs) if old != new), min(map(len, columns)))
    return {**curve, **{name: curve[name][first:] for name in _POINTS}, "from": first}
