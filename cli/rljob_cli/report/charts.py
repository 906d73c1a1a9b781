"""Panels of curves as inline SVG. Pure.

Colours are classes of the page's style, which has a light and a dark scheme; a curve also differs from its neighbours
by its dashes. Every point has its values as a tooltip, and the page lists them in a table for those who cannot see it.
A chart says where its steps are, so that a click leads to the samples of a step.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from markupsafe import Markup, escape

from rljob_cli.run.curves import Curve, Panel

WIDTH, HEIGHT = 460, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 10, 34
_MAX_BAR_WIDTH = 36.0
NUM_COLOURS = 8
MAX_MARKERS = 80
"""Points of a curve that have a visible marker; more would hide the line."""
_NUM_TICKS = 5


def draw_panel(panel: Panel, number: int) -> Markup:
    """Return one panel as an `svg` element. `number` makes its ids unique."""
    curves = stack(panel.curves) if panel.is_stacked else panel.curves
    points = [point for curve in curves for point in curve.points]
    steps, values = [x for x, _ in points], [y for _, y in points]
    if panel.is_stacked or panel.is_share:
        values.append(0.0)
    if panel.is_share:
        values.append(1.0)
    margin = _MAX_BAR_WIDTH / 2 if panel.is_stacked else 0.0
    x_axis = Axis(steps, _LEFT + margin, WIDTH - _RIGHT - margin)
    y_axis = Axis(values, HEIGHT - _BOTTOM, _TOP)
    described = ", ".join(f"{curve.name}: {_describe(curve)}" for curve in panel.curves)
    parts = [
        Markup(
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="chart-{number}-title" '
            f'data-steps="{x_axis.describe()}">'
        ),
        Markup('<title id="chart-{}-title">{} by step ({}). {}</title>').format(
            number, panel.title, panel.unit, described
        ),
        *_draw_axes(x_axis, y_axis),
    ]
    # The topmost area is drawn first, so that those below it cover its lower part.
    for index in reversed(range(len(curves))) if panel.is_stacked else range(len(curves)):
        draw = _draw_area if panel.is_stacked else _draw_line
        parts.append(draw(curves[index], panel.curves[index], index, x_axis, y_axis))
    return Markup("").join([*parts, Markup("</svg>")])


class Axis:
    """Maps values to positions; the ticks are round numbers that contain all values."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        self.ticks = choose_ticks(min(values), max(values))
        self._start, self._end = start, end

    def describe(self) -> str:
        """Return the first and the last tick, each with its position."""
        low, high = self.ticks[0], self.ticks[-1]
        return f"{low!r} {self(low)} {high!r} {self(high)}"

    def __call__(self, value: float) -> float:
        low, high = self.ticks[0], self.ticks[-1]
        # Halves, because the difference of two huge numbers overflows.
        span = high / 2 - low / 2
        share = (value / 2 - low / 2) / span if span else 0.0
        return round(self._start + share * (self._end - self._start), 1)


def choose_ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers, at least two, from at most `low` to at least `high`."""
    if high == low:  # a constant: show its distance from zero
        low, high = (min(low, 0.0), max(high, 0.0)) if low else (0.0, 1.0)
    rough = high / _NUM_TICKS - low / _NUM_TICKS
    if not 1e-300 < rough < 1e300:
        return [low, high]
    magnitude = 10.0 ** math.floor(math.log10(rough))
    size = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= rough * (1 - 1e-9))
    first, last = math.floor(low / size + 1e-9), math.ceil(high / size - 1e-9)
    ticks = [number * size for number in range(first, last + 1)]
    # Between neighbouring floating-point numbers, no round ones exist.
    return ticks if all(left < right for left, right in pairwise(ticks)) else [low, high]


def stack(curves: Sequence[Curve]) -> list[Curve]:
    """Return the curves with the sum of those before them added, point by point."""
    stacked: list[Curve] = []
    below = [0.0] * len(curves[0].points)
    for curve in curves:
        below = [base + y for base, (_, y) in zip(below, curve.points, strict=True)]
        steps = [x for x, _ in curve.points]
        stacked.append(Curve(curve.name, tuple(zip(steps, below, strict=True)), curve.is_held_out))
    return stacked


def format_number(value: float) -> str:
    """At most four significant digits, without an exponent where it is short."""
    text = f"{value:.4g}"
    return f"{int(float(text))}" if "e+" in text and abs(value) < 1e7 else text


def colour_class(index: int) -> str:
    return f"c{index % NUM_COLOURS}"


def _describe(curve: Curve) -> str:
    first, last = curve.points[0][1], curve.points[-1][1]
    return f"{format_number(first)} to {format_number(last)} in {len(curve.points)} points"


def _format_tick(value: float, ticks: Sequence[float]) -> str:
    """Return a tick with the digits in which it differs from the next one."""
    size = ticks[1] - ticks[0]
    if 1e-4 <= size < 1e6 and abs(value) < 1e7:
        return f"{value:.{max(0, -math.floor(math.log10(size) + 1e-9))}f}"
    return format_number(value)


def _draw_axes(x_axis: Axis, y_axis: Axis) -> list[Markup]:
    parts = []
    for value in y_axis.ticks:
        y = y_axis(value)
        parts.append(Markup(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>'))
        label = escape(_format_tick(value, y_axis.ticks))
        parts.append(Markup(f'<text class="tick" x="{_LEFT - 6}" y="{y + 3.5}" text-anchor="end">{label}</text>'))
    for value in x_axis.ticks:
        if abs(value - round(value)) > 1e-9:
            continue  # steps are whole numbers
        x = x_axis(value)
        parts.append(Markup(f'<line class="grid" x1="{x}" x2="{x}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>'))
        label = escape(format_number(value))
        parts.append(
            Markup(f'<text class="tick" x="{x}" y="{HEIGHT - _BOTTOM + 14}" text-anchor="middle">{label}</text>')
        )
    parts.append(Markup(f'<text class="label" x="{WIDTH - _RIGHT}" y="{HEIGHT - 4}" text-anchor="end">step</text>'))
    return parts


def _draw_line(curve: Curve, _: Curve, index: int, x_axis: Axis, y_axis: Axis) -> Markup:
    places = [(x_axis(x), y_axis(y)) for x, y in curve.points]
    path = " ".join(f"{x},{y}" for x, y in places)
    held_out = " held-out" if curve.is_held_out else ""
    parts = [Markup(f'<polyline class="line {colour_class(index)}{held_out}" points="{path}"/>')]
    if len(places) <= MAX_MARKERS:
        parts += [_draw_point(curve, index, *both) for both in zip(curve.points, places, strict=True)]
    return Markup("").join(parts)


def _draw_point(curve: Curve, index: int, point: tuple[float, float], place: tuple[float, float]) -> Markup:
    text = Markup("<title>{}, step {}: {}</title>").format(curve.name, format_number(point[0]), format_number(point[1]))
    lane = Markup(' data-lane="eval"') if curve.is_held_out else ""
    data = (colour_class(index), *place, lane, Markup(' data-run="{}"').format(curve.run) if curve.run else "", text)
    return Markup('<circle class="point {}" cx="{}" cy="{}" r="3"{}{}>{}</circle>').format(*data)


def _draw_area(stacked: Curve, own: Curve, index: int, x_axis: Axis, y_axis: Axis) -> Markup:
    """Draw one bar per step from zero to the top of the stack; those below are drawn over it."""
    xs = [x_axis(x) for x, _ in stacked.points]
    gap = min((right - left for left, right in pairwise(xs)), default=_MAX_BAR_WIDTH)
    width, bottom = max(0.5, min(0.8 * gap, _MAX_BAR_WIDTH)), y_axis(0.0)
    parts = []
    for x, (step, top), (_, value) in zip(xs, stacked.points, own.points, strict=True):
        y = y_axis(top)
        text = Markup("<title>{}, step {}: {}</title>").format(own.name, format_number(step), format_number(value))
        parts.append(
            Markup('<rect class="area {}" x="{}" y="{}" width="{}" height="{}">{}</rect>').format(
                colour_class(index), round(x - width / 2, 1), y, round(width, 1), round(bottom - y, 1), text
            )
        )
    return Markup("").join(parts)
