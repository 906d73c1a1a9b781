"""What the trajectory log has of an update: tokens, log-probs and places."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from rljob_api.run.trajectories import REPLAY_COLUMNS
from rljob_inputs.prompts import Prompt
from rljob_trainer.episodes.types import Completion, Group, TrainedAs, single_turn
from rljob_trainer.history.trajectory_log import write_file


def read(folder: Path, lane: Any, trained_as: TrainedAs | None) -> list[dict[str, Any]]:
    prompt, path = Prompt(0, "?", [1, 2]), folder / "step.parquet"
    completions = [Completion(ids, [-0.5] * len(ids), [4] * len(ids), "a", False, "g") for ids in ([3], [5, 6])]
    episodes = [single_turn(prompt, 0, sample, each) for sample, each in enumerate(completions)]
    write_file(path, lane, 1, [Group(0, prompt, episodes, trained_as)])
    rows: list[dict[str, Any]] = pq.read_table(path, columns=list(REPLAY_COLUMNS)).to_pylist()
    return rows


def test_a_trained_sample_has_its_tokens_and_its_place_in_the_step(tmp_path: Path) -> None:
    first, second = read(tmp_path, "train", TrainedAs(2, 1, 7))
    place = {"update": 2, "part": 1, "position": 7}
    assert first == {**place, "token_ids": [1, 2, 3], "logprobs": [np.float32(-0.5)], "versions": [4]}
    assert second["token_ids"] == [1, 2, 5, 6]
    assert second["logprobs"] == pytest.approx([-0.5, -0.5])
    assert second["versions"] == [4, 4]


def test_a_sample_of_an_evaluation_has_none(tmp_path: Path) -> None:
    assert {value for row in read(tmp_path, "eval", None) for value in row.values()} == {None}
