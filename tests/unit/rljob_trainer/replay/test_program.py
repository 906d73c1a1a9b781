"""What a job needs of a recorded step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJobSpec
from rljob_api.run.folder import trajectory_file
from rljob_inputs.prompts import Prompt
from rljob_trainer.episodes.types import Episode, Group, ScoredResult, TrainedAs
from rljob_trainer.history.run_state import FILE_DRIVER
from rljob_trainer.history.trajectory_log import write_file
from rljob_trainer.replay.program import Settings, find_checkpoint, read_settings, read_step
from tests.support.driver_harness import make_job
from tests.support.episodes import episode


def scored(group: int, sample: int) -> Episode:
    result = ScoredResult(id="x", valid=True, score=float(sample))
    return episode([1, 2, 3], index=(0, group, sample), results={"correct": result}, score=float(sample))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    groups = [
        Group(number, Prompt(0, "?", [1]), [scored(number, i) for i in range(4)], TrainedAs(0, 0, number))
        for number in range(2)
    ]
    write_file(trajectory_file(tmp_path, 1, "train"), "train", 1, groups)
    return tmp_path


def spec(**fields: Any) -> RLJobSpec:
    found: RLJobSpec = make_job(schedule={"promptsPerStep": 2}, **fields).spec
    return found


def test_scores_are_those_of_the_jobs_weights(run: Path) -> None:
    reward = {"name": "correct", "function": {"inline": "x"}}
    for weight in (1.0, 0.5):
        [first, _] = read_step(run, spec(rewards=[reward | {"weight": weight}]), 1)
        assert [each.score for each in first.episodes] == [0.0, weight, 2 * weight, 3 * weight]


def test_other_number_of_prompts_is_refused(run: Path) -> None:
    with pytest.raises(UserError, match=r"spec.schedule.promptsPerStep must be 2, the groups of .*, got 4"):
        read_step(run, make_job().spec, 1)


def test_reward_without_results_is_refused(run: Path) -> None:
    rewards = [{"name": name, "function": {"inline": "x"}} for name in ("correct", "style")]
    with pytest.raises(UserError, match=r"has no results of style, and a replay asks no reward"):
        read_step(run, spec(rewards=rewards), 1)


def test_reward_of_evaluation_alone_needs_no_results_and_is_in_no_score(run: Path) -> None:
    names = {"correct": "both", "held-out": "evaluation"}
    rewards = [{"name": name, "function": {"inline": "x"}, "use": use} for name, use in names.items()]
    [first, _] = read_step(run, spec(rewards=rewards), 1)
    assert [each.score for each in first.episodes] == [0.0, 1.0, 2.0, 3.0]


def test_damaged_checkpoint_is_refused_and_left_as_it_is(run: Path) -> None:
    folder = run / "checkpoints" / "step-000002"
    folder.mkdir(parents=True)
    (folder / FILE_DRIVER).write_text("{}")
    (folder / "COMPLETE").write_text("no")
    with pytest.raises(UserError, match=r"step-000002 is damaged: .*--steps"):
        find_checkpoint(run, 2)
    assert folder.exists(), "another run's folder is only read"
    assert find_checkpoint(run, None) is None


def test_settings_are_those_of_the_command(tmp_path: Path) -> None:
    path = tmp_path / "replay.json"
    path.write_text('{"run": "/runs/a", "checkpoint": null, "steps": [1, 2]}')
    assert read_settings(path) == Settings("/runs/a", None, [1, 2])
