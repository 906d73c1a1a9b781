"""What a page learns of a run: nothing is lost and nothing comes twice, also over reconnections."""

import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.run.metrics import append_records
from rljob_api.wire.driver_status import BusyShares, DriverStatus, HungPart, Outage, RewardDemand, ScheduleStatus
from rljob_cli.trajectories.index import Query
from rljob_cli.ui.runs import WatchedRun
from rljob_cli.ui.server import (
    Cursor,
    Event,
    add_charts,
    begin,
    describe_status,
    find_records,
    find_samples,
    parse_cursor,
    read_page,
    render_live,
)
from tests.paths import DATA
from tests.support.records import evaluation_record, metrics_of, result_row, sample_row, step_record


def steps(*numbers):
    return [step_record(number, reward=number / 10, time=100.0 + number) for number in numbers]


def test_new_records_are_sent_once():
    cursor = begin(metrics_of(*steps(1, 2)))
    assert find_records(metrics_of(*steps(1, 2)), cursor) == ([], cursor)
    evaluation = evaluation_record(3, 0.25, time=104.0)
    [event], cursor = find_records(metrics_of(*steps(1, 2, 3), evaluation), cursor)
    assert event == Event("records", {"line": "evaluation after step 3, accuracy 0.250"})
    assert find_records(metrics_of(*steps(1, 2, 3), evaluation), parse_cursor(str(cursor)))[0] == []


def test_history_that_was_cut_starts_again():
    cursor = begin(metrics_of(*steps(1, 2, 3)))
    [event], cursor = find_records(metrics_of(*steps(1, 2)), cursor)
    assert event.kind == "restarted"
    repeated = [*steps(1, 2), step_record(3, time=999.0)]
    [event], cursor = find_records(metrics_of(*repeated), cursor)
    assert event == Event("records", {"line": "step 3"})
    [event], _ = find_records(metrics_of(*repeated), begin(metrics_of(*steps(1, 2, 3))))
    assert event.kind == "restarted", "as many steps, and the last one is another"


def rows(*numbers):
    return [sample_row(sample=number, rewards=[result_row(0.5)]) for number in numbers]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.integers(1, 12))
def test_each_sample_is_sent_once_or_counted_as_lost(arrivals, kept):
    cursor, seen, lost, total = Cursor(feed="f"), [], 0, 0
    for number in arrivals:
        total += number
        feed = rows(*range(max(0, total - kept), total))
        events, cursor = find_samples("f", total, feed, parse_cursor(str(cursor)))
        for event in events:
            seen += [sample["sample"] for sample in event.data["samples"]]
            lost += event.data["lost"]
    assert seen == sorted(set(seen))
    assert len(seen) + lost == total


def test_another_head_starts_its_numbers_again():
    _, cursor = find_samples("a", 9, rows(7, 8), Cursor())
    [event], cursor = find_samples("b", 2, rows(0, 1), cursor)
    assert ([each["sample"] for each in event.data["samples"]], event.data["lost"]) == ([0, 1], 0)
    assert find_samples("", 0, [], cursor) == ([], cursor), "no head answers"


@pytest.mark.parametrize("text", ["", "x", "1.2", "a.b.c.d.e", "1.2.3.f.x"])
def test_unknown_cursor_is_the_beginning(text):
    assert parse_cursor(text) == Cursor()


def test_event_is_one_line_of_data_with_its_cursor():
    text = Event("samples", {"text": "a\nb\u2028"}).encode(Cursor(1, 0, 5, "f", 2)).decode()
    kind, identity, data, *rest = text.split("\n")
    assert (kind, identity, rest) == ("event: samples", "id: 1.0.5.f.2", ["", ""])
    assert json.loads(data.removeprefix("data: ")) == {"text": "a\nb\u2028"}


def test_status_says_who_waits_for_whom():
    status = DriverStatus(
        step=3,
        total_steps=9,
        phase="score",
        waits_for="waits for 3 of 64 rewards",
        demand={"judge": RewardDemand(in_flight=3, waiting=1, oldest_in_flight_seconds=4.25)},
        hung=[HungPart(role="rollout", name="pod-1", seconds=90, limit_seconds=60, doing="generates")],
        outages=[Outage(what="spec.hub", seconds=12, limit_seconds=100, message="refused")],
        schedule=ScheduleStatus(groups_in_flight=2, groups_scored=1, busy=BusyShares(rollouts=0.5, rewards=0.9)),
    )
    assert dict(describe_status(status)["rows"]) == {
        "steps": "3 of 9 have ended",
        "driver": "score: waits for 3 of 64 rewards",
        "rollout": "pod-1 hangs for 90 s; generates",
        "spec.hub": "is away for 12 s: refused",
        "groups": "2 in flight, 1 scored",
        "requests of judge": "3 in flight, 1 wait for a replica, the oldest for 4.2 s",
        "at work in the last step": "rollouts 50%, rewards 90%",
    }
    assert describe_status(None) == {"is_running": False, "rows": []}


@pytest.fixture
def run(tmp_path):
    return WatchedRun("letters", shutil.copytree(DATA / "report", tmp_path / "letters"))


def test_a_new_step_sends_its_points_and_the_sections_without_curves(run):
    page = render_live(run, {"letters": run}, [])
    cursor = begin(run.read_metrics())
    append_records(run.folder / "metrics.jsonl", [step_record(9, reward=0.75, time=2e9)])
    [event], _ = find_records(run.read_metrics(), cursor)
    [reward, *_] = add_charts(event, run, [], cursor).data["charts"]
    assert [(curve["name"], curve["from"], curve["x"], curve["y"]) for curve in reward["curves"]] == [
        ("training", 8, [9], [0.75]),
        ("held out", 3, [], []),
    ]
    sections = render_live(run, {"letters": run}, [], is_whole=False)
    assert "9/8" in sections
    assert len(sections) < 0.3 * len(page)


def test_a_restart_sends_all_points(run):
    event = add_charts(Event("restarted", {"line": ""}), run, [], begin(run.read_metrics()))
    assert [curve["from"] for chart in event.data["charts"] for curve in chart["curves"]].count(0) > 20


def test_runs_laid_over_each_other_are_in_the_points_of_a_new_step(run, tmp_path):
    other = WatchedRun("other", shutil.copytree(DATA / "report", tmp_path / "other"))
    cursor = begin(run.read_metrics())
    append_records(run.folder / "metrics.jsonl", [step_record(9, reward=0.75, time=2e9)])
    [reward, *_] = add_charts(Event("records", {}), run, [other], cursor).data["charts"]
    assert {curve["name"]: curve["x"] for curve in reward["curves"]} == {
        "letters: training": [9], "letters: held out": [], "other: training": [], "other: held out": [],
    }  # fmt: skip


def test_a_step_without_samples_names_the_nearest_one(run):
    page = read_page(run, Query(step=12345, lane="train"), 0, 40)
    assert (page.matching, page.nearest) == (0, "8 train")
    page = read_page(run, Query(step=3, lane="train"), 0, 40)
    assert ({sample["step"] for sample in page.samples}, page.nearest) == ({3}, "")


def test_a_page_of_samples_names_what_cannot_be_read(run):
    path = run.folder / "trajectories" / "step-000003.train.parquet"
    path.write_bytes(path.read_bytes()[:1000])
    page = read_page(run, Query(), 0, 200)
    assert (page.total, page.damaged) == (136, ["step-000003.train.parquet"])
