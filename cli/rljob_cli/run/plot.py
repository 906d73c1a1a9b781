"""Draws the curves of a run as a picture. Imports matplotlib only to draw."""

import math
from pathlib import Path
from typing import Any

from rljob_api.run.metrics import Metrics
from rljob_cli.run.curves import Panel, build_panels

_MAX_COLUMNS = 3
_WIDTH_INCHES, _HEIGHT_INCHES = 4.6, 2.9
"""Size of one panel."""


def draw_curves(metrics: Metrics, path: Path) -> bool:
    """Draw the panels in rows of three. Return False without a step or an evaluation."""
    panels = build_panels(metrics)
    if not panels:
        return False
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    num_columns = min(_MAX_COLUMNS, len(panels))
    num_rows = math.ceil(len(panels) / num_columns)
    size = (_WIDTH_INCHES * num_columns, _HEIGHT_INCHES * num_rows)
    figure, axes = plt.subplots(num_rows, num_columns, figsize=size, squeeze=False, layout="constrained")
    for axis, panel in zip(axes.flat, panels, strict=False):
        _draw(axis, panel)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    figure.savefig(path, dpi=100)
    plt.close(figure)
    return True


def _draw(axis: Any, panel: Panel) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_title(panel.title, fontsize="medium", parse_math=False)
    axis.set_ylabel(panel.unit, fontsize="small")
    axis.set_xlabel(f"step ({panel.note})" if panel.note else "step", fontsize="small")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.3)
    if panel.is_stacked:
        xs = [step for step, _ in panel.curves[0].points]
        heights = [[value for _, value in curve.points] for curve in panel.curves]
        axis.stackplot(xs, heights, labels=[curve.name for curve in panel.curves])
    else:
        for curve in panel.curves:
            steps, values = zip(*curve.points, strict=True)
            axis.plot(steps, values, "s--" if curve.is_held_out else ".-", label=curve.name)
    if panel.is_share:
        axis.set_ylim(-0.03, 1.03)
    if len(panel.curves) > 1:
        axis.legend(loc="best", fontsize="x-small")
