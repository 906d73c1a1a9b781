"""`python tests/integration/monitoring/draw.py [SECONDS]`: docs/images/dashboard.png, of a real Prometheus over a run.

Runs the tests' scene for a while, asks Prometheus for the range of every query of the dashboard, and draws the panels
with matplotlib where Grafana would lay them. Says on the picture that it is no screenshot.
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import dashboard
import matplotlib as mpl
import prometheus_tools
import pytest
import scene
from PIL import Image

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

_PICTURE = Path(__file__).resolve().parents[3] / "docs" / "images" / "dashboard.png"
_WINDOW_SECONDS = 20
_NOTE = (
    "Drawn by matplotlib from the answers of a real Prometheus to the dashboard's queries; not a screenshot of "
    "Grafana. Rewards, driver and operator's metrics are real, rollouts and trainers stand-ins."
)
Answer = tuple[dashboard.Query, list[dict[str, Any]]]


async def watch(seconds: float) -> list[tuple[dict[str, Any], list[Answer]]]:
    """Every panel with what Prometheus answers after that time; a repeated panel once a component."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as monkeypatch:
        watched = scene.Scene(Path(folder), monkeypatch)
        async with watched.running():
            configs = scene.build_scrape_configs(watched.operator_port)
            prometheus = prometheus_tools.Prometheus(Path(folder), scene.PROMETHEUS, configs)
            try:
                await asyncio.to_thread(prometheus.wait_until_up, scene.NUM_TARGETS)
                began = time.time()
                await asyncio.sleep(seconds)
                return [
                    (panel, [(query, ask(prometheus, query, began)) for query in queries])
                    for panel, queries in expand(prometheus)
                ]
            finally:
                prometheus.stop()


def expand(prometheus: prometheus_tools.Prometheus) -> list[tuple[dict[str, Any], list[dashboard.Query]]]:
    """The panels with their queries, repeats done as Grafana does them."""
    found = []
    for panel in dashboard.list_panels():
        variable = panel.get("repeat")
        values = prometheus.ask(f"label/{variable}/values") if variable else [""]
        for value in values:
            chosen = {variable: value} if variable else {}
            queries = dashboard.list_queries(panel, window=f"{_WINDOW_SECONDS}s", span="5m", **chosen)
            found.append(({**panel, "title": panel["title"].replace(f"${variable}", value)}, queries))
    return found


def ask(prometheus: prometheus_tools.Prometheus, query: dashboard.Query, began: float) -> list[dict[str, Any]]:
    answer = prometheus.ask("query_range", query=query.expression, start=began, end=time.time(), step=2)
    series: list[dict[str, Any]] = answer["result"]
    return series


def draw(panels: list[tuple[dict[str, Any], list[Answer]]]) -> None:
    num_rows = -(-len(panels) // 3)
    figure, axes = plt.subplots(num_rows, 3, figsize=(18, 3.2 * num_rows), layout="constrained")
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, (panel, answers) in zip(axes.flat, panels, strict=False):
        axis.set_axis_on()
        axis.set_title(panel["title"], loc="left", fontsize=11, fontweight="bold")
        if panel["type"] == "heatmap":
            draw_heatmap(axis, answers[0][1])
        elif panel["fieldConfig"]["defaults"].get("custom", {}).get("stacking"):
            draw_bars(axis, answers)
        else:
            draw_lines(axis, answers)
        if panel["type"] != "heatmap":
            unit = panel["fieldConfig"]["defaults"]["unit"]
            axis.set_ylabel({"s": "seconds", "percentunit": "share", "reqps": "requests/s"}.get(unit, ""), fontsize=8)
        axis.set_xlabel("seconds", fontsize=7, loc="right")
        axis.tick_params(labelsize=7)
    figure.suptitle("RLJob", fontsize=16, x=0.01, ha="left")
    figure.supxlabel(_NOTE, fontsize=9)
    figure.savefig(_PICTURE, dpi=70)
    plt.close(figure)
    with Image.open(_PICTURE) as picture:  # a third of the size
        picture.convert("RGB").quantize(96).save(_PICTURE, optimize=True)
    print(_PICTURE)


def label(query: dashboard.Query, metric: dict[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda match: metric.get(match[1], ""), query.legend)


def points(series: dict[str, Any]) -> tuple[list[float], list[float]]:
    values = [(float(when), float(value)) for when, value in series["values"]]
    return [when for when, _ in values], [value for _, value in values]


def draw_lines(axis: Axes, answers: list[Answer]) -> None:
    zero = min((points(s)[0][0] for _, found in answers for s in found), default=0.0)
    for query, found in answers:
        for series in found:
            xs, ys = points(series)
            axis.plot([x - zero for x in xs], ys, label=label(query, series["metric"]), linewidth=1.2)
    axis.grid(alpha=0.3)
    if 0 < len(axis.lines) <= 14:
        axis.legend(fontsize=6, ncols=2, loc="upper left")


def draw_bars(axis: Axes, answers: list[Answer]) -> None:
    """Stacked, as Grafana does."""
    all_points = [
        (label(query, s["metric"]), dict(zip(*points(s), strict=True))) for query, found in answers for s in found
    ]
    times = sorted({when for _, values in all_points for when in values})
    base = [0.0] * len(times)
    for name, values in all_points:
        heights = [values.get(when, 0.0) for when in times]
        if any(heights):
            axis.bar([when - times[0] for when in times], heights, width=2, bottom=base, label=name)
            base = [low + height for low, height in zip(base, heights, strict=True)]
    axis.grid(alpha=0.3)
    if axis.patches:
        axis.legend(fontsize=6, ncols=2, loc="upper left")


def draw_heatmap(axis: Axes, found: list[dict[str, Any]]) -> None:
    """Buckets are cumulative: each row is what its bound adds to the one below."""
    ordered = sorted(found, key=lambda series: float(series["metric"]["le"].replace("+Inf", "inf")))
    values = [dict(zip(*points(series), strict=True)) for series in ordered]
    times = sorted({when for row in values for when in row})
    grid, below = [], [0.0] * len(times)
    for row in values:
        total = [row.get(when, 0.0) for when in times]
        grid.append([max(0.0, now - before) for now, before in zip(total, below, strict=True)])
        below = total
    axis.imshow(grid, aspect="auto", origin="lower", cmap="Blues", extent=(0, times[-1] - times[0], 0, len(grid)))
    axis.set_yticks(
        [i + 0.5 for i in range(len(grid))], [f"<= {series['metric']['le']}" for series in ordered], fontsize=5
    )


if __name__ == "__main__":
    draw(asyncio.run(watch(float(sys.argv[1]) if len(sys.argv) > 1 else 150.0)))
