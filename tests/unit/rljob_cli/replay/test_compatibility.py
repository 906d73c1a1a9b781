"""What may differ between a run and its replay."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_cli.replay.compatibility import find_changes, find_obstacles
from rljob_cli.run.runfolder import dump
from tests.support.driver_harness import make_job


def spec(**fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = dump(make_job(**fields))["spec"]
    return found


def test_same_job_has_neither_changes_nor_obstacles() -> None:
    assert find_changes(spec(), spec()) == []
    assert find_obstacles(spec(), spec(), 2) == []


def test_algorithm_may_change_and_is_shown_by_its_path() -> None:
    now = spec(algorithm={"groupSize": 4, "loss": {"clipHigh": 0.3}}, evaluation={"atStart": False})
    assert [change.describe() for change in find_changes(spec(), now)] == ["spec.algorithm.loss.clipHigh: none -> 0.3"]
    assert find_obstacles(spec(), now, 2) == []


def test_weight_of_a_reward_may_change() -> None:
    reward = {"name": "correct", "function": {"inline": "x"}, "weight": 0.5}
    now = spec(rewards=[reward])
    assert [change.describe() for change in find_changes(spec(), now)] == ["spec.rewards[0].weight: 1.0 -> 0.5"]
    assert find_obstacles(spec(), now, None) == []


def test_a_reward_of_evaluation_alone_may_be_added() -> None:
    added = {"name": "held-out", "function": {"inline": "x"}}
    rewards = [{"name": "correct", "function": {"inline": "x"}}, added | {"use": "evaluation"}]
    assert find_obstacles(spec(), spec(rewards=rewards), None) == []
    [obstacle] = find_obstacles(spec(rewards=rewards), spec(rewards=[rewards[0], added]), None)
    assert obstacle.startswith("spec.rewards: the run has no results of held-out"), "it scored no training episode"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"model": {"source": "/other"}},
            "spec.model.source must be /m, as in the run, got /other: the recorded tokens",
        ),
        ({"algorithm": {"groupSize": 8}}, "spec.algorithm.groupSize must be 4, as in the run, got 8"),
        ({"schedule": {"promptsPerStep": 8}}, "spec.schedule.promptsPerStep must be 4, as in the run, got 8"),
        (
            {"rollout": {"sampling": {"temperature": 0.5}}},
            "spec.rollout.sampling.temperature must be 1.0, as in the run",
        ),
        ({"rewards": [{"name": "new", "function": {"inline": "x"}}]}, "spec.rewards: the run has no results of new"),
    ],
)
def test_what_the_record_depends_on_must_be_as_in_the_run(fields: dict[str, Any], message: str) -> None:
    [obstacle] = find_obstacles(spec(), spec(**fields), None)
    assert obstacle.startswith(message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"trainer": {"lora": {"rank": 8}}}, "spec.trainer.lora must be as in the run: the checkpoint of step 2"),
        ({"algorithm": {"type": "ppo", "groupSize": 4}}, "spec.algorithm.type: ppo has a critic, and the checkpoint"),
    ],
)
def test_checkpoint_needs_the_parameters_of_the_run(fields: dict[str, Any], message: str) -> None:
    [obstacle] = find_obstacles(spec(), spec(**fields), 2)
    assert obstacle.startswith(message)
    assert "--steps 1:N" in obstacle
    assert find_obstacles(spec(), spec(**fields), None) == [], "the initial model has any parameters"
