"""The limit follows a kind's own history, between a floor and a ceiling."""

import statistics

from hypothesis import given
from hypothesis import strategies as st

from rljob_api.manifest.job_sections import HangDetection
from rljob_trainer.liveness.judge import Pace

SECONDS = st.floats(min_value=0, max_value=1e5)
BOUNDS = st.builds(
    HangDetection,
    min_seconds=st.integers(min_value=1, max_value=1000),
    max_seconds=st.integers(min_value=1, max_value=10**5),
)


@given(bounds=BOUNDS, durations=st.lists(SECONDS, min_size=1, max_size=64))
def test_twenty_times_the_median_is_never_a_hang_below_the_ceiling(bounds, durations):
    pace = Pace(bounds)
    for seconds in durations:
        pace.record("step", seconds)
    limit = pace.limit("step")
    assert min(20 * statistics.median(durations), bounds.max_seconds) <= limit <= bounds.max_seconds
    assert limit >= min(bounds.min_seconds, bounds.max_seconds)
    assert limit >= min(2 * max(durations), bounds.max_seconds), "what was seen to end may take twice as long"


@given(bounds=BOUNDS, durations=st.lists(SECONDS, max_size=20))
def test_work_of_a_kind_that_never_ended_may_take_the_ceiling(bounds, durations):
    pace = Pace(bounds)
    for seconds in durations:
        pace.record("step", seconds)
    assert pace.limit("save") == bounds.max_seconds


def test_a_rare_long_piece_is_remembered_longer_than_the_others():
    pace = Pace(HangDetection(min_seconds=1, max_seconds=7200))
    pace.record("step", 600.0)
    for _ in range(1000):
        pace.record("step", 1.0)
    assert pace.limit("step") == 1200.0
