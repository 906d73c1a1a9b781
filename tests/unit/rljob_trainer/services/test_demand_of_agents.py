"""The predicted demand on a simulated user, on tools and on a runner."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.manifest.schedule import Schedule
from rljob_trainer.episodes.progress import CollectionProgress
from rljob_trainer.services.demand import CallTotals, Forecaster, OpenEpisodes, ServiceLoad

N = 64
SCHEDULE = Schedule(steps=10)


def forecaster_of(schedule):
    """Return the forecaster of a job with groups of one episode."""
    return Forecaster.of(schedule.model_copy(update={"prompts_per_step": N}), 1, needs_whole_step=False)


def playing(num_generated=0, num_samples=N, started_at=1000.0, lane="train", seconds=40.0):
    """Return a step whose first episodes ended evenly over `seconds`."""
    ended_at = [started_at + seconds * (i + 1) / num_samples for i in range(num_generated)]
    return CollectionProgress(lane, num_samples, started_at=started_at, ended_at=ended_at)


def load(num_calls=0, busy_seconds=0.0, wait_seconds=0.0, lane="train", **fields):
    if num_calls:
        fields.setdefault("latency_seconds", busy_seconds / num_calls)
    return ServiceLoad(totals={lane: CallTotals(num_calls, busy_seconds, wait_seconds)}, **fields)


def predict(forecaster, episodes, now, found, name="calc"):
    return forecaster.demand_on(name, found, forecaster.predict_episodes(episodes, now))


def after_step(found, name="calc", **fields):
    """Return a forecaster that has seen one step of 40 s, from 1000 on, with the calls of `found`."""
    forecaster = forecaster_of(SCHEDULE)
    forecaster.record_begin(1000.0, {name: load()})
    forecaster.record_end(playing(N), 0.0, loads={name: found}, **fields)
    return forecaster


def slots(demand, utilization=1.0):
    """Little's law, as the operator applies it."""
    if demand.holds_slots:
        return demand.samples
    return min(
        demand.samples,
        demand.samples * demand.latency_seconds / max(demand.window_seconds * utilization, demand.latency_seconds),
    )


@pytest.mark.parametrize("train", [None, playing()])
def test_runner_needs_a_slot_for_each_episode_before_anything_is_measured(train):
    demand = predict(forecaster_of(SCHEDULE), OpenEpisodes(train), 1001.0, load(holds_slots=True), "runner")
    assert (demand.samples, demand.holds_slots, demand.is_open) == (N, True, train is not None)


@pytest.mark.parametrize(
    ("schedule", "steps", "at_once"),
    [("onPolicy", 10, N), ("oneStepOff", 10, 2 * N), ("bounded", 10, 3 * N), ("bounded", 2, 2 * N), ("bounded", 1, N)],
)
def test_schedule_says_how_many_episodes_are_in_flight_before_the_first_step(schedule, steps, at_once):
    forecaster = forecaster_of(Schedule(type=schedule, steps=steps))
    assert predict(forecaster, OpenEpisodes(), 0.0, load(holds_slots=True)).samples == at_once


def test_lanes_say_how_many_episodes_are_in_flight():
    forecaster, runner = forecaster_of(SCHEDULE), load(holds_slots=True)
    held_out = playing(num_samples=20, lane="eval")
    assert predict(forecaster, OpenEpisodes(playing(), at_once=100), 1001.0, runner).samples == 100
    assert predict(forecaster, OpenEpisodes(playing(), held_out, at_once=100), 1001.0, runner).samples == 120
    assert predict(forecaster, OpenEpisodes(None, held_out, at_once=100), 1001.0, runner).samples == 20


def test_runner_reports_the_latency_of_an_episode_as_its_target():
    demand = predict(forecaster_of(SCHEDULE), OpenEpisodes(playing()), 1001.0, load(2, 30.0, holds_slots=True))
    assert (demand.latency_seconds, demand.window_seconds) == (15.0, 15.0)


def test_calls_of_a_step_are_spread_over_its_episodes():
    """64 episodes x 2 calls x 0.5 s in 40 s keep 1.6 slots busy."""
    found = load(2 * N, N * 1.0)
    demand = predict(after_step(found), OpenEpisodes(playing()), 1001.0, found)
    assert (demand.samples, demand.latency_seconds, demand.window_seconds) == (N, 1.0, 40.0)
    assert slots(demand) == pytest.approx(1.6)


def test_time_of_waits_does_not_count_for_calls():
    """Otherwise a tool with one slot looks as if one slot sufficed."""
    found = load(4 * N, N * 8.0, wait_seconds=N * 30.0)
    demand = predict(after_step(found), OpenEpisodes(playing()), 1001.0, found)
    assert (demand.latency_seconds, demand.window_seconds) == (8.0, 10.0)
    assert slots(demand) == pytest.approx(N * 0.8)


def test_waits_of_episodes_of_several_steps_overlap():
    found = load(N, N * 1.0, wait_seconds=N * 30.0)
    forecaster = after_step(found, pipeline_seconds=40.0)
    demand = predict(forecaster, OpenEpisodes(playing(), at_once=3 * N), 1001.0, found)
    assert demand.window_seconds == 30.0


def test_never_more_slots_than_episodes():
    found = load(100 * N, N * 400.0, wait_seconds=N * 400.0)
    assert slots(predict(after_step(found), OpenEpisodes(playing()), 1001.0, found)) == N


def test_slower_calls_count_at_once():
    demand = predict(
        after_step(load(2 * N, N * 1.0)), OpenEpisodes(playing()), 1001.0, load(2 * N, N * 1.0, latency_seconds=2.0)
    )
    assert demand.latency_seconds == 4.0


def test_first_step_goes_by_its_pace_so_far():
    forecaster = forecaster_of(SCHEDULE)
    assert predict(forecaster, OpenEpisodes(playing()), 1010.0, load()).latency_seconds is None, "one Pod, to measure"
    demand = predict(forecaster, OpenEpisodes(playing()), 1010.0, load(160, 160.0, wait_seconds=N * 8.0))
    assert demand.is_first
    assert (demand.latency_seconds, demand.window_seconds) == (2.5, 2.0)
    assert slots(demand) == N


def test_tool_that_was_not_called_keeps_a_pod_while_a_step_is_near():
    demand = predict(after_step(load()), OpenEpisodes(playing()), 1001.0, load())
    assert (demand.samples, demand.latency_seconds) == (N, 0.0)


def test_late_step_needs_slots_for_calls_alone():
    """An episode that waits for its completion needs none."""
    found = load(2 * N, N * 1.0, in_flight=3)
    assert predict(after_step(found), OpenEpisodes(playing()), 1200.0, found).expected == 3


def test_next_step_is_as_far_away_as_the_last_one_was():
    forecaster = after_step(load())
    forecaster.record_begin(1100.0, {"calc": load()})
    forecaster.record_end(playing(N, started_at=1100.0), 0.0, loads={"calc": load()})
    demand = predict(forecaster, OpenEpisodes(), 1150.0, load())
    assert (demand.is_open, demand.samples, demand.starts_in_seconds) == (False, N, 50.0)
    forecaster.record_interruption()
    assert predict(forecaster, OpenEpisodes(), 1150.0, load()).starts_in_seconds == 0.0


def test_nothing_is_needed_after_the_last_episode():
    forecaster = after_step(load())
    for found in (load(), load(holds_slots=True)):
        demand = predict(forecaster, OpenEpisodes(at_once=N, is_last=True), 1100.0, found)
        assert (demand.samples, demand.expected, demand.is_open) == (0, 0, False)


@given(
    in_flight=st.integers(1, 10_000),
    at_once=st.integers(0, 100),
    is_last=st.booleans(),
    holds_slots=st.booleans(),
    train=st.sampled_from([None, playing(), playing(N)]),
    has_history=st.booleans(),
    now=st.floats(1000, 2000),
)
def test_demand_covers_every_call_that_waits(in_flight, at_once, is_last, holds_slots, train, has_history, now):
    found = load(N, 3.0, in_flight=in_flight, waiting=in_flight, holds_slots=holds_slots)
    forecaster = after_step(load(N, 2.0)) if has_history else forecaster_of(SCHEDULE)
    demand = predict(forecaster, OpenEpisodes(train, None, at_once, is_last), now, found)
    assert demand.is_open
    assert min(demand.samples, demand.expected) >= in_flight
