"""`rljob run` on real vLLM, Ray and FSDP2 with faults: SIGKILL of every role during a step.

Resume is exact: the job succeeds, and trains on the same prompts as an undisturbed run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.local_run import SLOW_REWARD, Run

NUM_STEPS = 12


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(name: str, reward: str, *settings: str) -> Run:
        folder = tmp_path / name
        folder.mkdir()
        runs.append(Run(folder, reward, *settings))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


@pytest.mark.real
@pytest.mark.slow
def test_sigkill_of_each_role_skips_and_repeats_no_prompt(start: Callable[..., Run]) -> None:
    steps = f"spec.schedule.steps={NUM_STEPS}"
    undisturbed = start("undisturbed", SLOW_REWARD, steps).finish()

    run = start("killed", SLOW_REWARD, steps, "spec.checkpoint.everySteps=3")
    run.wait_for_step(1)
    run.kill("rljob_service.worker")
    run.wait_for_step(2)
    run.kill("-m rljob_service ")
    run.wait_for_step(4)
    run.kill("ray::RankProcess")
    run.wait_for_step(6)
    run.kill("-m rljob_trainer.rollout")
    run.wait_for_step(8)
    run.kill("-m rljob_trainer.head")
    summary = run.finish()

    assert summary.phase == "Succeeded"
    assert summary.prompts_trained == undisturbed.prompts_trained, "a prompt was skipped or trained on twice"
    assert len(summary.prompts_trained) == NUM_STEPS
    restarts = summary.restarts
    for role in ("head", "trainer", "rollout", "reward-letters"):
        assert restarts.get(role, 0) >= 1, f"{role} was killed, but its restart is not counted: {restarts}"
    assert len(set(summary.weight_digests.values())) == 1, "every rollout must serve what the trainer published"
