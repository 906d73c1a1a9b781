"""`python -m tests.integration.monitoring.draw [SECONDS]`: draws docs/images/dashboard.png.

Runs the tests' job for a while, queries a real Prometheus for every panel of the dashboard, and draws the panels with
matplotlib in the dashboard's rows and widths. The picture states that it is not a screenshot.
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tests.integration.monitoring import dashboard, prometheus_tools, running_job

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

_WINDOW_SECONDS = 20
_NOTE = (
    "Drawn by matplotlib from the answers of a real Prometheus to the dashboard's queries; not a screenshot of Grafana."
    "\nTime in seconds. Real: rewards, driver, the operator's metrics. "
    "Stand-ins: rollouts, trainers, conversations, the judge's endpoint."
)
_COLUMNS = 24
"""Columns of Grafana's grid."""
_LINE_INCHES, _HEADING_INCHES = 2.6, 0.4
_COLOURS = [*mpl.colormaps["tab20"].colors[::2], *mpl.colormaps["tab20"].colors[1::2]]  # the strong ones first
_MAX_LEGEND = 24
_CHARACTERS_PER_COLUMN = 6
"""Characters of a title."""
Answer = tuple[dashboard.Query, list[dict[str, Any]]]
Drawn = tuple[dict[str, Any], list[Answer]]
"""A panel and its answers; a row has none."""


async def watch(seconds: float) -> list[Drawn]:
    """Rows, and panels with what Prometheus answers after that time; a repeated panel once a component."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as monkeypatch:
        job = running_job.RunningJob(Path(folder), monkeypatch)
        async with job.running():
            configs = running_job.build_scrape_configs(job.operator_port)
            prometheus = prometheus_tools.Prometheus(Path(folder), running_job.PROMETHEUS, configs)
            try:
                await asyncio.to_thread(prometheus.wait_until_up, running_job.NUM_TARGETS)
                started_at = time.time()
                await asyncio.sleep(seconds)
                return [
                    (panel, [(query, ask(prometheus, query, started_at)) for query in queries])
                    for panel, queries in expand(prometheus)
                ]
            finally:
                prometheus.stop()


def expand(prometheus: prometheus_tools.Prometheus) -> list[tuple[dict[str, Any], list[dashboard.Query]]]:
    """Rows, and panels with their queries, repeats done as Grafana does them."""
    found: list[tuple[dict[str, Any], list[dashboard.Query]]] = []
    for panel in dashboard.list_all():
        if panel["type"] == "row":
            found.append((panel, []))
            continue
        variable = panel.get("repeat")
        values = prometheus.query_api(f"label/{variable}/values") if variable else [""]
        for value in values:
            chosen = {variable: value} if variable else {}
            queries = dashboard.list_queries(panel, window=f"{_WINDOW_SECONDS}s", span="5m", **chosen)
            found.append(({**panel, "title": panel["title"].replace(f"${variable}", value)}, queries))
    return found


def ask(prometheus: prometheus_tools.Prometheus, query: dashboard.Query, started_at: float) -> list[dict[str, Any]]:
    answer = prometheus.query_api("query_range", query=query.expression, start=started_at, end=time.time(), step=2)
    series: list[dict[str, Any]] = answer["result"]
    return series


def list_rows(drawn: list[Drawn]) -> list[tuple[str, list[list[Drawn]]]]:
    """Each row's title with its lines of panels, filled from the left."""
    rows: list[tuple[str, list[list[Drawn]]]] = []
    free = 0
    for panel, answers in drawn:
        width = panel["gridPos"]["w"]
        if panel["type"] == "row":
            rows.append((panel["title"], []))
            free = 0
            continue
        lines = rows[-1][1]
        if width > free:
            lines.append([])
            free = _COLUMNS
        lines[-1].append((panel, answers))
        free -= width
    return rows


def draw(drawn: list[Drawn]) -> None:
    rows = list_rows(drawn)
    heights = [_HEADING_INCHES + _LINE_INCHES * len(lines) for _, lines in rows]
    figure = plt.figure(figsize=(15, sum(heights) + _HEADING_INCHES), layout="constrained")
    parts = figure.subfigures(len(rows) + 1, 1, height_ratios=[*heights, _HEADING_INCHES])
    for part, (title, lines) in zip(parts, rows, strict=False):
        part.suptitle(title, fontsize=12, x=0.004, ha="left", color="#3b5b8c")
        grid = part.add_gridspec(len(lines), _COLUMNS)
        for number, line in enumerate(lines):
            at = 0
            for panel, answers in line:
                width = panel["gridPos"]["w"]
                draw_panel(part.add_subplot(grid[number, at : at + width]), panel, answers)
                at += width
    parts[-1].text(0.004, 0.5, _NOTE, fontsize=9, va="center")
    figure.savefig(dashboard.PICTURE, dpi=100)
    plt.close(figure)
    with Image.open(dashboard.PICTURE) as picture:  # a third of the size
        facts = PngInfo()
        facts.add_text(dashboard.DIGEST, dashboard.digest())
        picture.convert("RGB").quantize(128).save(dashboard.PICTURE, optimize=True, pnginfo=facts)
    print(dashboard.PICTURE)


def draw_panel(axis: Axes, panel: dict[str, Any], answers: list[Answer]) -> None:
    title = textwrap.fill(panel["title"], panel["gridPos"]["w"] * _CHARACTERS_PER_COLUMN)
    axis.set_title(title, loc="left", fontsize=9, fontweight="bold")
    axis.tick_params(labelsize=7)
    axis.set_prop_cycle(color=_COLOURS)
    if panel["type"] == "heatmap":
        return draw_heatmap(axis, answers[0][1])
    defaults = panel["fieldConfig"]["defaults"]
    if defaults.get("custom", {}).get("stacking"):
        draw_bars(axis, answers)
    else:
        draw_lines(axis, answers)
    axis.grid(alpha=0.3)
    axis.set_ylabel(
        {"s": "seconds", "percentunit": "share", "reqps": "requests/s"}.get(defaults["unit"], ""), fontsize=7
    )
    if "min" in defaults:
        axis.set_ylim(bottom=defaults["min"])
    if not any(value for _, found in answers for series in found for value in points(series)[1]):
        axis.text(0.5, 0.5, "0 throughout", transform=axis.transAxes, ha="center", color="gray", fontsize=8)
        axis.set_ylim(0, 1)
    if 0 < len(axis.get_legend_handles_labels()[0]) <= _MAX_LEGEND:
        columns = max(1, panel["gridPos"]["w"] * 3 // 8)
        axis.legend(fontsize=6, ncols=columns, loc="upper left", bbox_to_anchor=(0, -0.09), frameon=False, borderpad=0)


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


def draw_heatmap(axis: Axes, found: list[dict[str, Any]]) -> None:
    """Buckets are cumulative: each row is what its bound adds to the one below."""
    ordered = sorted(found, key=lambda series: float(series["metric"]["le"].replace("+Inf", "inf")))
    values = [dict(zip(*points(series), strict=True)) for series in ordered]
    times = sorted({when for row in values for when in row})
    if not times:  # the component came at the end
        return
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
