"""The clients of trackers: TensorBoard's files, W&B's run offline, and MLflow's names."""

import pytest

from rljob_api.run.gauges import flatten
from rljob_trainer.episodes.types import ScoredResult
from rljob_trainer.history.metrics import summarize_scores
from rljob_trainer.history.tracking import TensorBoard, TrackedRecord, mlflow_name
from tests.support.episodes import episode
from tests.support.records import step_record


def trajectory(**results):
    return episode(results=results, score=1.0)


def valid(score, **components):
    return ScoredResult(id="x", valid=True, score=score, components=components)


def step(number, **numbers):
    return TrackedRecord("step", number, flatten(step_record(number, **numbers)))


def read_curves(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_gets_one_curve_per_component(tmp_path):
    samples = [trajectory(a=valid(1.0, exact=1.0), b=valid(0.5)), trajectory(a=valid(0.0), b=valid(0.5, steps=3.0))]
    tracker = TensorBoard(tmp_path)
    tracker.log(step(1, components=summarize_scores(samples)))
    tracker.log(step(2, components=summarize_scores(samples[:1])))
    tracker.close()
    curves = {tag: [number for number, _ in curve] for tag, curve in read_curves(tmp_path).items()}
    assert {tag: curve for tag, curve in curves.items() if tag.startswith("step/components")} == {
        "step/components/score": [1, 2],
        "step/components/a": [1, 2],
        "step/components/a/exact": [1, 2],
        "step/components/b": [1, 2],
        "step/components/b/steps": [1],
    }


def test_restart_truncates_only_the_steps_that_are_repeated(tmp_path):
    tracker = TensorBoard(tmp_path)
    tracker.restart_at(0)
    for number in (1, 2, 3):
        tracker.log(step(number, reward=float(number)))
    tracker.restart_at(2)
    tracker.log(step(3, reward=30.0))
    tracker.close()
    found = read_curves(tmp_path)["step/reward"]
    assert found == [(1, 1.0), (2, 2.0), (3, 30.0)], "step 2 is in the checkpoint and is not repeated"


@pytest.mark.parametrize(
    ("name", "accepted"),
    [
        ("step/components/score", "step/components/score"),
        ("step/components/acc@1 (%)", "step/components/acc_1 ___"),
        ("step/components/", "step/components"),
        ("a//b/../c", "a/c"),
        ("é" * 300, "_" * 250),
        ("", "_"),
    ],
)
def test_names_that_mlflow_refuses_are_changed(name, accepted):
    from mlflow.utils.validation import _validate_metric_name

    _validate_metric_name(mlflow_name(name))
    assert mlflow_name(name) == accepted


def test_the_config_of_mlflow_has_paths():
    from rljob_trainer.history.tracking import _flatten_settings

    spec = {"rewards": [{"name": "r"}], "tags": ["a"], "schedule": {"steps": 3}}
    assert _flatten_settings(spec) == [("rewards.0.name", "r"), ("tags", ["a"]), ("schedule.steps", 3)]
