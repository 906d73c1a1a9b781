"""Trackers: TensorBoard's curves, and trackers that fail."""

from rljob_trainer.episodes.types import ScoredResult
from rljob_trainer.history.metrics import flatten, summarize_scores
from rljob_trainer.history.prometheus import PrometheusMetrics
from rljob_trainer.history.tracking import TensorBoard, Trackers
from tests.support.episodes import episode


def trajectory(**results):
    return episode(results=results, score=1.0)


def valid(score, **components):
    return ScoredResult(id="x", valid=True, score=score, components=components)


def test_tensorboard_gets_one_curve_per_component(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    samples = [trajectory(a=valid(1.0, exact=1.0), b=valid(0.5)), trajectory(a=valid(0.0), b=valid(0.5, steps=3.0))]
    tracker = TensorBoard(tmp_path)
    tracker.log("step", 1, flatten({"components": summarize_scores(samples)}))
    tracker.log("step", 2, flatten({"components": summarize_scores(samples[:1])}))
    tracker.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    curves = {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert curves == {
        "step/components/score": [1, 2],
        "step/components/a": [1, 2],
        "step/components/a/exact": [1, 2],
        "step/components/b": [1, 2],
        "step/components/b/steps": [1],
    }


def test_restart_truncates_only_the_steps_that_are_repeated(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = Trackers([TensorBoard(tmp_path)])
    trackers.restart_at(0)
    for step in (1, 2, 3):
        trackers.log("step", step, {"reward": float(step)})
    trackers.restart_at(2)
    trackers.log("step", 3, {"reward": 30.0})
    trackers.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    found = [(event.step, event.value) for event in events.Scalars("step/reward")]
    assert found == [(1, 1.0), (2, 2.0), (3, 30.0)], "step 2 is in the checkpoint and is not repeated"


def test_tracker_that_fails_to_close_does_not_fail_the_job():
    class Broken:
        num_ends = 0

        def log(self, kind, step, numbers): ...

        def close(self):
            self.num_ends += 1
            raise ConnectionError

    broken = Broken()
    Trackers([broken, PrometheusMetrics()]).close()
    assert broken.num_ends == 1


def test_failing_tracker_is_disabled():
    class Broken:
        def log(self, kind, step, numbers):
            raise ConnectionError

        def close(self): ...

    prometheus = PrometheusMetrics()
    trackers = Trackers([Broken(), prometheus])
    trackers.log("step", 1, {"reward": 0.5, "phase_seconds/update": 2.0})
    trackers.log("step", 2, {"reward": 0.75})
    text = prometheus.render().decode()
    assert "rljob_step_reward 0.75" in text
    assert "rljob_step_phase_seconds_update 2.0" in text
