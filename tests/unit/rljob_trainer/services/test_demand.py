"""The predicted demand of the next collection on the rewards."""

import pytest

from rljob_trainer.algorithms.registry import build_algorithm
from rljob_trainer.driver.dispatcher import Dispatcher
from rljob_trainer.driver.schedules import build_schedule
from rljob_trainer.episodes.progress import CollectionProgress
from rljob_trainer.services.demand import Forecaster, measure_window
from tests.support.driver_harness import make_job
from tests.support.episodes import episode

N = 100


def forecaster_of(spec):
    """Return the forecaster of a job, as the driver builds it."""
    needs_whole_step = build_algorithm(spec).needs.whole_step
    return Forecaster.of(spec.schedule, spec.algorithm.group_size, needs_whole_step=needs_whole_step)


def collected(ends, lane="train", started_at=1000.0, scored_at=None):
    """Return a finished collection whose samples ended `ends` seconds after its start."""
    ended_at = [started_at + end for end in ends]
    return CollectionProgress(
        lane,
        len(ends),
        started_at=started_at,
        ended_at=ended_at,
        num_scored=len(ends),
        scored_at=scored_at or ended_at[-1],
    )


def evenly(seconds, count=N):
    return [seconds * (i + 1) / count for i in range(count)]


def started(num_generated=0, num_scored=0, lane="train"):
    ended_at = [2001.0] * num_generated
    return CollectionProgress(lane, N, started_at=2000.0, ended_at=ended_at, num_scored=num_scored)


def test_window_of_evenly_spaced_samples_is_their_generation():
    assert measure_window(evenly(40), 40, 1) == pytest.approx(40, rel=0.05)


def test_window_of_samples_at_the_end_is_the_time_after_it():
    assert measure_window([40.0] * N, 50, 1) == 10
    assert measure_window([40.0] * N, 40, 2) == 2, "never less than one latency: that is one slot per sample"


def test_window_includes_the_time_after_generation():
    assert measure_window(evenly(40), 140, 1) == pytest.approx(140, rel=0.01)


@pytest.mark.parametrize("shift", range(1, 30, 7))
def test_window_never_grows_with_later_samples(shift):
    later = [end + (shift if i > N // 2 else 0) for i, end in enumerate(evenly(40))]
    assert measure_window(sorted(later), 80, 1) <= measure_window(evenly(40), 80, 1)


def test_scores_are_due_at_the_end_of_generation_if_updates_wait_for_all():
    forecaster = Forecaster(N)
    forecaster.record_end(collected(evenly(40)), update_seconds=200)
    assert forecaster.predict_scores(started(), 2005.0, is_open=True, is_last=False).demand.due_seconds == 40


def step_end(scored_at, group_seconds, schedule):
    """Return when a step ends whose groups are scored at these times, if the trainer trains what the schedule takes."""
    dispatcher, events, now = Dispatcher(len(scored_at), 0), sorted((at, i) for i, at in enumerate(scored_at)), 0.0
    while dispatcher.can_start():
        dispatcher.start()
    while dispatcher.num_left:
        while events and events[0][0] <= now:
            dispatcher.record_scored(events.pop(0)[1])
        taken = schedule.take(dispatcher, dispatcher.num_left)
        now = now + len(taken) * group_seconds if taken else events[0][0]
    return now


@pytest.mark.parametrize(("type", "update_seconds"), [("onPolicy", 200), ("onPolicy", 20), ("synchronous", 200)])
def test_scores_are_due_when_later_ones_would_make_the_step_longer(type, update_seconds):
    ends = evenly(40, 20)  # of 20 groups
    spec = make_job(schedule={"type": type, "promptsPerStep": 20, "miniBatches": 4}).spec
    progress = collected(ends)
    progress.episodes = [episode(index=(i, i, 0), ended_at=1000.0 + end) for i, end in enumerate(ends)]
    forecaster = forecaster_of(spec)
    forecaster.record_end(progress, update_seconds)
    due = forecaster.predict_scores(started(), 2005.0, is_open=True, is_last=False).demand.due_seconds
    schedule, group_seconds = build_schedule(spec.schedule), update_seconds / 20

    def end(last):
        return step_end([*ends[:-1], last], group_seconds, schedule)

    assert end(due) == pytest.approx(end(ends[-1])), "no later than with a score at once"
    assert end(due + 1) == pytest.approx(end(due) + 1)


@pytest.mark.parametrize("algorithm", [{"type": "reinforcePlusPlus"}, {"advantages": {"perReward": True}}])
def test_algorithm_that_waits_for_the_step_needs_all_scores_at_the_end_of_generation(algorithm):
    forecaster = forecaster_of(make_job(algorithm=algorithm, schedule={"miniBatches": 2}).spec)
    forecaster.record_end(collected(evenly(40)), update_seconds=200)
    assert forecaster.predict_scores(started(), 2005.0, is_open=True, is_last=False).demand.due_seconds == 40


def test_forecast_of_an_open_collection_counts_the_remaining_samples():
    forecast = Forecaster(N).predict_scores(
        started(num_generated=60, num_scored=30), 2012.0, is_open=True, is_last=True
    )
    assert (
        forecast.demand.samples,
        forecast.demand.expected,
        forecast.demand.is_open,
        forecast.demand.elapsed_seconds,
    ) == (N, N - 30, True, 12)


def test_first_collection_is_predicted_from_its_generated_share():
    forecaster = Forecaster(N)
    assert forecaster.predict_scores(started(5), 2010.0, is_open=True, is_last=False).demand.due_seconds is None, (
        "too few samples"
    )
    forecast = forecaster.predict_scores(started(25), 2010.0, is_open=True, is_last=False)
    assert (forecast.demand.due_seconds, forecast.window_seconds(3.0)) == (40, 40)
    assert forecaster.predict_scores(started(), 2010.0, is_open=True, is_last=False).window_seconds(None) is None


def test_forecast_between_collections_predicts_the_next_start():
    forecaster = Forecaster(N)
    forecaster.record_begin(1000.0)
    progress = collected(evenly(40), scored_at=1060.0)
    forecaster.record_end(progress, 100)
    early = forecaster.predict_scores(progress, 1100.0, is_open=False, is_last=False).demand
    assert (early.samples, early.expected, early.starts_in_seconds) == (N, N, 0), "the pause is unknown"
    assert not early.is_first
    assert Forecaster(N).predict_scores(progress, 1100.0, is_open=True, is_last=False).demand.is_first
    forecaster.record_begin(1160.0)
    forecaster.record_end(progress := collected(evenly(40), started_at=1160.0, scored_at=1220.0), 100)
    for now, starts_in_seconds in ((1250.0, 70), (1999.0, 0)):
        forecast = forecaster.predict_scores(progress, now, is_open=False, is_last=False)
        assert forecast.demand.starts_in_seconds == starts_in_seconds


def test_trainer_restart_does_not_count_as_a_pause():
    """Otherwise the predicted pause would be too long, and rewards would scale down just before a burst."""
    forecaster = Forecaster(N)
    forecaster.record_end(progress := collected(evenly(40), scored_at=1060.0), 100)
    forecaster.record_begin(1160.0)
    forecaster.record_end(progress, 100)
    forecaster.record_interruption()
    assert forecaster.predict_scores(progress, 1900.0, is_open=False, is_last=False).demand.starts_in_seconds == 0, (
        "as soon as possible"
    )
    forecaster.record_begin(3000.0)
    forecaster.record_end(progress := collected(evenly(40), started_at=3000.0, scored_at=3060.0), 100)
    assert forecaster.predict_scores(progress, 3070.0, is_open=False, is_last=False).demand.starts_in_seconds == 90


def test_nothing_is_expected_after_the_last_collection():
    forecaster = Forecaster(N)
    forecaster.record_end(progress := collected(evenly(40)), 100)
    forecast = forecaster.predict_scores(progress, 1100.0, is_open=False, is_last=True)
    assert (forecast.demand.samples, forecast.demand.due_seconds, forecast.demand.is_first) == (0, 40, False), (
        "the measured times are still reported"
    )


def test_evaluation_has_a_separate_forecast():
    forecaster = Forecaster(N)
    forecaster.record_end(collected(evenly(40)), 200)
    forecaster.record_end(collected(evenly(8), lane="eval"), 0)
    evaluation = forecaster.predict_scores(started(lane="eval"), 2001.0, is_open=True, is_last=False)
    assert (evaluation.demand.due_seconds, evaluation.window_seconds(1.0)) == (8, pytest.approx(8, rel=0.05))
    assert forecaster.predict_scores(started(), 2001.0, is_open=True, is_last=False).demand.due_seconds == 40


def test_large_collection_is_stored_as_a_subsample():
    forecaster = Forecaster(20_000, 1)
    forecaster.record_end(collected(evenly(40, 20_000)), 0)
    forecast = forecaster.predict_scores(started(), 2001.0, is_open=True, is_last=False)
    assert len(forecast.ends) <= 256
    assert forecast.window_seconds(1.0) == pytest.approx(40, rel=0.05)
