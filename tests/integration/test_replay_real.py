"""A replay of a run on real vLLM, Ray and FSDP2 has its weights, bit by bit. It starts neither vLLM nor a reward."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.local_run import DEADLINE_SECONDS, RLJOB, Run

REWARD = (
    'def compute_score(data_source, solution_str, ground_truth, extra_info=None): return solution_str.count("e") / 10'
)


def replay(job: Path, run: Path, folder: Path, *arguments: str) -> dict[str, Any]:
    command = [RLJOB, "run", job, "--dir", folder, "--from-trajectories", run, "-o", "json", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
    assert result.returncode == 0, result.stderr
    logs = sorted(path.name.partition("-")[2] for path in (folder / "tiny-replay" / "logs").glob("*.log"))
    assert {name.partition("-")[0].partition(".")[0] for name in logs} == {"head", "trainer"}
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.real
@pytest.mark.slow
def test_replay_repeats_the_weights_of_a_run_and_shows_what_a_change_does(tmp_path: Path) -> None:
    run = Run(tmp_path, REWARD, "spec.schedule.steps=3", "spec.schedule.miniBatches=2", "spec.checkpoint.everySteps=2")
    try:
        run.finish()
    finally:
        run.close()
    job = tmp_path / "rljob.yaml"
    # Of the run: its command line had them.
    given = ("--set", "spec.schedule.steps=3", "--set", "spec.schedule.miniBatches=2")

    same = replay(job, run.folder, tmp_path / "same", *given)
    assert (same["changes"], same["is_equal"]) == ([], True), "the same code on the same episodes"
    assert [step["has_equal_weights"] for step in same["steps"]] == [True, True, True]

    other = replay(job, run.folder, tmp_path / "other", *given, "--set", "spec.algorithm.type=rloo", "--steps", "3")
    assert (other["checkpoint"], [step["step"] for step in other["steps"]]) == (2, [3])
    assert other["changes"] == ["spec.algorithm.type: grpo -> rloo"]
    assert not other["is_equal"]
    assert all(step["difference"]["num_tokens"] == 0 for step in other["steps"]), "the same rows"
