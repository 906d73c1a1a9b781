"""What the next collection will ask of the rewards, by what the last one did."""

import pytest

from rljob_trainer.driver.collection import CollectionProgress
from rljob_trainer.rewards.forecast import DemandForecaster, measure_window

N = 100


def collected(ends, lane="train", started_at=1000.0, scored_at=None):
    """A collection that is over: its samples ended at these seconds after its begin."""
    progress = CollectionProgress(lane, len(ends), len(ends), len(ends), started_at=started_at)
    progress.ended_at = [started_at + end for end in ends]
    progress.generated_at = max(progress.ended_at)
    progress.scored_at = scored_at if scored_at is not None else progress.generated_at
    return progress


def evenly(seconds, count=N):
    return [seconds * (i + 1) / count for i in range(count)]


def begun(num_generated=0, num_scored=0, lane="train"):
    return CollectionProgress(lane, N, num_generated, num_scored, started_at=2000.0)


def test_samples_that_come_evenly_are_due_within_their_generation():
    assert measure_window(evenly(40), 40, 1) == pytest.approx(40, rel=0.05)


def test_samples_that_all_come_at_the_end_have_only_the_time_after_it():
    assert measure_window([40.0] * N, 50, 1) == 10
    assert measure_window([40.0] * N, 40, 2) == 2, "and never less than one takes: that is a slot for each"


def test_time_for_updates_before_the_last_mini_batch_is_time_to_score():
    assert measure_window(evenly(40), 140, 1) == pytest.approx(140, rel=0.01)


@pytest.mark.parametrize("shift", range(1, 30, 7))
def test_later_samples_never_widen_the_window(shift):
    later = [end + (shift if i > N // 2 else 0) for i, end in enumerate(evenly(40))]
    assert measure_window(sorted(later), 80, 1) <= measure_window(evenly(40), 80, 1)


def test_without_mini_batches_scores_are_wanted_when_generation_ends():
    forecaster = DemandForecaster(N, mini_batches=1)
    forecaster.record_end(collected(evenly(40)), update_seconds=200)
    assert forecaster.predict(begun(), 2005.0, is_open=True, is_last=False).due_seconds == 40


def test_mini_batches_give_the_last_scores_the_time_of_the_updates_before():
    forecaster = DemandForecaster(N, mini_batches=4)
    forecaster.record_end(collected(evenly(40)), update_seconds=200)
    assert forecaster.predict(begun(), 2005.0, is_open=True, is_last=False).due_seconds == 40 + 150


def test_a_collection_under_way_says_what_is_left_of_it():
    forecast = DemandForecaster(N, 1).predict(
        begun(num_generated=60, num_scored=30), 2012.0, is_open=True, is_last=True
    )
    assert (forecast.samples, forecast.expected, forecast.is_open, forecast.elapsed_seconds) == (N, N - 30, True, 12)


def test_the_first_collection_is_foretold_by_its_own_part_that_is_there():
    forecaster = DemandForecaster(N, 1)
    assert forecaster.predict(begun(5), 2010.0, is_open=True, is_last=False).due_seconds is None, "too little to tell"
    forecast = forecaster.predict(begun(25), 2010.0, is_open=True, is_last=False)
    assert (forecast.due_seconds, forecast.window_seconds(3.0)) == (40, 40)
    assert forecaster.predict(begun(), 2010.0, is_open=True, is_last=False).window_seconds(None) is None
    parts = DemandForecaster(N, 4).predict(begun(25), 2010.0, is_open=True, is_last=False)
    assert parts.due_seconds == 40 + 30, "three of four updates, reckoned to take as long as generation"


def test_between_two_collections_it_says_when_the_next_begins():
    forecaster = DemandForecaster(N, 1)
    forecaster.record_begin(1000.0)
    progress = collected(evenly(40), scored_at=1060.0)
    forecaster.record_end(progress, 100)
    early = forecaster.predict(progress, 1100.0, is_open=False, is_last=False)
    assert (early.samples, early.expected, early.starts_in_seconds) == (N, N, 0), "no pause is known: it may be now"
    assert (early.is_first, DemandForecaster(N, 1).predict(progress, 1100.0, is_open=True, is_last=False).is_first) == (
        False,
        True,
    )
    forecaster.record_begin(1160.0)
    forecaster.record_end(progress := collected(evenly(40), started_at=1160.0, scored_at=1220.0), 100)
    assert forecaster.predict(progress, 1250.0, is_open=False, is_last=False).starts_in_seconds == 70
    assert forecaster.predict(progress, 1999.0, is_open=False, is_last=False).starts_in_seconds == 0, "it is late"


def test_a_restart_of_the_trainers_is_no_pause_between_two_collections():
    """Else the next pause would be taken for as long, and rewards would shrink before a burst that is near."""
    forecaster = DemandForecaster(N, 1)
    forecaster.record_end(progress := collected(evenly(40), scored_at=1060.0), 100)
    forecaster.record_begin(1160.0)
    forecaster.record_end(progress, 100)
    forecaster.record_interruption()
    assert forecaster.predict(progress, 1900.0, is_open=False, is_last=False).starts_in_seconds == 0, (
        "as soon as it can"
    )
    forecaster.record_begin(3000.0)
    forecaster.record_end(progress := collected(evenly(40), started_at=3000.0, scored_at=3060.0), 100)
    assert forecaster.predict(progress, 3070.0, is_open=False, is_last=False).starts_in_seconds == 90


def test_after_the_last_collection_nothing_is_expected():
    forecaster = DemandForecaster(N, 1)
    forecaster.record_end(progress := collected(evenly(40)), 100)
    forecast = forecaster.predict(progress, 1100.0, is_open=False, is_last=True)
    assert (forecast.samples, forecast.due_seconds, forecast.is_first) == (0, 40, False), (
        "but what it took is still told"
    )


def test_evaluation_has_a_forecast_of_its_own():
    forecaster = DemandForecaster(N, 4)
    forecaster.record_end(collected(evenly(40)), 200)
    forecaster.record_end(collected(evenly(8), lane="eval"), 0)
    evaluation = forecaster.predict(begun(lane="eval"), 2001.0, is_open=True, is_last=False)
    assert (evaluation.due_seconds, evaluation.window_seconds(1.0)) == (8, pytest.approx(8, rel=0.05))
    assert forecaster.predict(begun(), 2001.0, is_open=True, is_last=False).due_seconds == 190


def test_a_large_collection_is_remembered_by_a_part_of_its_ends():
    forecaster = DemandForecaster(20_000, 1)
    forecaster.record_end(collected(evenly(40, 20_000)), 0)
    forecast = forecaster.predict(begun(), 2001.0, is_open=True, is_last=False)
    assert len(forecast.ends) <= 256
    assert forecast.window_seconds(1.0) == pytest.approx(40, rel=0.05)
