"""A replay of a run on real vLLM, Ray and FSDP2 has its weights, bit by bit. It starts neither vLLM nor a reward."""

from __future__ import annotations

import json
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.local_run import DEADLINE_SECONDS, RLJOB, Run

pytestmark = [pytest.mark.real, pytest.mark.slow]
REWARD = (
    'def compute_score(data_source, solution_str, ground_truth, extra_info=None): return solution_str.count("e") / 10'
)


def replay(run: Path, folder: Path, *arguments: str) -> dict[str, Any]:
    given = ("--set", "spec.schedule.steps=3", "--set", "spec.schedule.miniBatches=2")  # as the run's command line
    job = run.parent / "rljob.yaml"
    command = [RLJOB, "run", job, "--dir", folder, "--from-trajectories", run, "-o", "json", *given, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
    assert result.returncode == 0, result.stderr
    logs = sorted(path.name.partition("-")[2] for path in (folder / "tiny-replay" / "logs").glob("*.log"))
    assert {name.partition("-")[0].partition(".")[0] for name in logs} == {"head", "trainer"}
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of the job next to it."""
    settings = ("spec.schedule.steps=3", "spec.schedule.miniBatches=2", "spec.checkpoint.everySteps=2")
    with closing(Run(tmp_path_factory.mktemp("run"), REWARD, *settings)) as run:
        run.finish()
    return run.folder


def test_replay_repeats_the_weights_of_a_run(run: Path, tmp_path: Path) -> None:
    same = replay(run, tmp_path)
    assert (same["changes"], same["is_equal"]) == ([], True), "the same code on the same episodes"
    assert [step["has_equal_weights"] for step in same["steps"]] == [True, True, True]


@pytest.mark.nightly
def test_replay_from_a_checkpoint_shows_what_a_change_does(run: Path, tmp_path: Path) -> None:
    other = replay(run, tmp_path, "--set", "spec.algorithm.type=rloo", "--steps", "3")
    assert (other["checkpoint"], [step["step"] for step in other["steps"]]) == (2, [3])
    assert other["changes"] == ["spec.algorithm.type: grpo -> rloo"]
    assert not other["is_equal"]
    assert all(step["difference"]["num_tokens"] == 0 for step in other["steps"]), "the same rows"
