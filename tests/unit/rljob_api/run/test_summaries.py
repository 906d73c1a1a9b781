"""The summaries of a run, as files."""

import math

import pytest

from rljob_api.run.sessions import Session
from rljob_api.run.summaries import (
    DeliveryCounts,
    DriverSummary,
    EvaluationSummary,
    format_summary,
    read_driver_summary,
    read_run_summary,
)
from tests.support.records import run_summary


def test_summaries_are_the_same_after_a_round_trip(tmp_path):
    driver = DriverSummary(steps=2, trackers={"mlflow": DeliveryCounts(sent=3)}, model_commit="c0ffee")
    (tmp_path / "driver-summary.json").write_text(format_summary(driver))
    assert read_driver_summary(tmp_path) == driver
    evaluation = EvaluationSummary(step=2, accuracy=0.5, means={"exact": 0.5})
    run = run_summary(evaluations=[evaluation], sessions=[Session(started="now")], chat_template_arguments={"a": [1]})
    (tmp_path / "summary.json").write_text(format_summary(run))
    assert read_run_summary(tmp_path) == run


def test_numbers_that_are_not_finite_are_kept(tmp_path):
    driver = DriverSummary(accuracy_after=-math.inf, eval_after={"length": math.inf})
    (tmp_path / "driver-summary.json").write_text(format_summary(driver))
    assert read_driver_summary(tmp_path) == driver


@pytest.mark.parametrize("text", [None, "", '{"phase": "Succ', '{"phase": "Succeeded"}'])
def test_missing_or_incomplete_summary_is_unknown(tmp_path, text):
    if text is not None:
        (tmp_path / "summary.json").write_text(text)
    assert read_run_summary(tmp_path) is None
