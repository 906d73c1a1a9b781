"""Panels as SVG: every value has a point within the plot, and every text is escaped."""

import math
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_cli.report.charts import HEIGHT, WIDTH, choose_ticks, draw_panel, format_number, stack
from rljob_cli.run.curves import Curve, Panel

FINITE = st.floats(allow_nan=False, allow_infinity=False)


def panel(*curves, **fields):
    return Panel("Reward", "score", tuple(Curve(name, tuple(points)) for name, points in curves), **fields)


def parse(drawn):
    return ET.fromstring(str(drawn))


def test_each_value_is_a_point_with_a_tooltip():
    svg = parse(draw_panel(panel(("training", [(1, 0.25), (2, 0.5)])), 3))
    assert [point.find("title").text for point in svg.iter("circle")] == [
        "training, step 1: 0.25",
        "training, step 2: 0.5",
    ]
    assert svg.get("aria-labelledby") == "chart-3-title"
    assert "training: 0.25 to 0.5 in 2 points" in svg.find("title").text


def test_texts_of_the_run_are_escaped():
    svg = parse(draw_panel(panel(("</svg><script>alert(1)</script>", [(1, 1.0)])), 0))
    assert list(svg.iter("script")) == []
    assert "<script>" in svg.find("title").text


def test_stacked_bars_add_up():
    phases = panel(("a", [(1, 1.0), (2, 2.0)]), ("b", [(1, 3.0), (2, 0.0)]), is_stacked=True)
    assert [curve.points for curve in stack(phases.curves)] == [((1, 1.0), (2, 2.0)), ((1, 4.0), (2, 2.0))]
    bars = list(parse(draw_panel(phases, 0)).iter("rect"))
    assert [bar.find("title").text for bar in bars][:2] == ["b, step 1: 3", "b, step 2: 0"], "drawn below the others"
    heights = {bar.find("title").text: float(bar.get("height")) for bar in bars}
    assert heights["b, step 1: 3"] == pytest.approx(4 * heights["a, step 1: 1"], rel=0.01)


def test_shares_always_have_the_same_axis():
    low, high = (parse(draw_panel(panel(("x", [(1, y)]), is_share=True), 0)) for y in (0.1, 0.9))
    ticks = [[text.text for text in svg.iter("text")] for svg in (low, high)]
    assert ticks[0] == ticks[1]


def test_long_curves_have_no_markers():
    svg = parse(draw_panel(panel(("x", [(step, 0.5) for step in range(200)])), 0))
    assert list(svg.iter("circle")) == []
    assert len(svg.find("polyline").get("points").split()) == 200


@given(st.lists(FINITE, min_size=1, max_size=8))
def test_any_finite_values_are_drawn_within_the_chart(values):
    svg = parse(draw_panel(panel(("x", list(enumerate(values)))), 0))
    for point in svg.iter("circle"):
        assert 0 <= float(point.get("cx")) <= WIDTH
        assert 0 <= float(point.get("cy")) <= HEIGHT


@given(FINITE, FINITE)
def test_ticks_contain_the_values_and_are_few(first, second):
    low, high = sorted((first, second))
    ticks = choose_ticks(low, high)
    margin = 1e-6 * max(abs(low), abs(high))
    assert ticks[0] <= low + margin
    assert ticks[-1] >= high - margin
    assert ticks == sorted(set(ticks))
    assert 2 <= len(ticks) <= 12
    assert all(math.isfinite(tick) for tick in ticks)


def test_ticks_are_round_numbers():
    assert choose_ticks(0, 1) == [0, 0.2, 0.4, pytest.approx(0.6), 0.8, 1.0]
    assert choose_ticks(0, 0) == [0, 0.2, 0.4, pytest.approx(0.6), 0.8, 1.0]


@pytest.mark.parametrize(
    ("value", "text"), [(0.123456, "0.1235"), (123456.0, "123500"), (1e9, "1e+09"), (2e-7, "2e-07")]
)
def test_numbers_have_four_digits(value, text):
    assert format_number(value) == text
