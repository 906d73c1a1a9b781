"""What each role did when, from the events of a head."""

import json

import pytest

from bench.timeline import Timeline, busy_shares, draw, find_busy_intervals

EVENTS = [
    (10.0, "rewards", 1),
    (12.0, "trainer", 1),
    (12.5, "trainer", -1),
    (12.52, "trainer", 1),
    (11.0, "rewards", 1),  # written later
    (13.0, "rewards", -1),
    (14.0, "rewards", -1),
    (15.0, "trainer", -1),
    (16.0, "rollouts", 1),  # not ended: the head was stopped
]


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "timeline.jsonl"
    file.write_text("".join(f"{json.dumps(event)}\n" for event in EVENTS))
    return file


def test_overlapping_work_and_short_gaps_are_one_interval(path):
    assert find_busy_intervals(path) == {"rollouts": [], "rewards": [(10.0, 14.0)], "trainer": [(12.0, 15.0)]}


def test_shares_count_only_the_time_between_begin_and_end(path):
    assert busy_shares(path, 8.0, 13.0) == pytest.approx({"rollouts": 0.0, "rewards": 0.6, "trainer": 0.2})


def test_picture_has_a_row_for_each_variant(path, tmp_path):
    timelines = [Timeline("onPolicy", path, [9.0, 12.0, 15.0]), Timeline("bounded", path, [9.0, 15.0])]
    draw(timelines, tmp_path / "images" / "overlap.png", {"bounded": 1.01})
    assert (tmp_path / "images" / "overlap.png").stat().st_size > 10_000
