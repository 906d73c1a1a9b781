"""What the page draws, as data: exact steps, and of what a page has already only what is new."""

import json

from hypothesis import given
from hypothesis import strategies as st

from rljob_cli.report.charts import describe_panels, find_tails
from rljob_cli.run.curves import Curve, Panel, build_panels
from tests.support.records import evaluation_record, metrics_of, step_record


def panel(*curves, **fields):
    return Panel("Reward", "score", tuple(Curve(name, tuple(points)) for name, points in curves), **fields)


def test_steps_above_9999_are_exact():
    [chart] = describe_panels([panel(("training", [(12341, 0.123456789), (12343, 1e-9)]))])
    [curve] = chart["curves"]
    assert curve["x"] == [12341, 12343]
    assert curve["y"] == [0.123457, 1e-9]


def test_only_points_that_a_page_does_not_have_are_sent():
    before = describe_panels([panel(("a", [(1, 0.5), (2, 0.25)]), ("gone", [(1, 1.0)]))])
    now = describe_panels([panel(("a", [(1, 0.5), (2, 0.75), (3, 1.0)]), ("new", [(3, 2.0)]))])
    [chart] = find_tails(before, now)
    assert [(each["name"], each["from"], each["x"], each["y"]) for each in chart["curves"]] == [
        ("a", 1, [2, 3], [0.75, 1.0]),
        ("new", 0, [3], [2.0]),
    ]


def extend(known, tails):
    """What the page does with them."""
    curves = {(chart["title"], curve["name"]): curve for chart in known for curve in chart["curves"]}
    for chart in tails:
        for curve in chart["curves"]:
            own = curves.get((chart["title"], curve["name"]), {})
            for name in ("x", "y", "low", "high"):
                curve[name] = own.get(name, [])[: curve["from"]] + curve[name]
            del curve["from"]
    return tails


def records(count):
    steps = [step_record(number, reward=number % 7 / 7, grad_norm=float(number)) for number in range(1, count + 1)]
    return metrics_of(*steps, *(evaluation_record(number, number / 9999) for number in range(0, count, 100)))


@given(st.integers(1, 1700), st.integers(1, 30))
def test_a_page_that_is_extended_has_what_a_new_one_has(before, more):
    known, now = (describe_panels(build_panels(records(count))) for count in (before, before + more))
    assert extend(known, find_tails(known, now)) == now


def test_a_step_of_a_long_run_sends_little():
    known, now = (describe_panels(build_panels(records(count))) for count in (9_990, 9_991))
    tails = find_tails(known, now)
    assert max(len(curve["x"]) for chart in tails for curve in chart["curves"]) == 1
    assert len(json.dumps(tails)) < 0.05 * len(json.dumps(now))
