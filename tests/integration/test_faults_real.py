"""`rljob run` on real vLLM, Ray and FSDP2 with faults: SIGKILL of every role during a step, and a failing reward.

Resume is exact: the job succeeds, and trains on the same prompts as an undisturbed run. A failure of a reward is never
a zero: every tenth call raises, hangs or returns NaN, and its sample is masked and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.local_run import SLOW_REWARD, Run

NUM_STEPS = 12

FAILING_REWARD = """
import random, time
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    fate = hash((extra_info["index"], solution_str)) % 30
    if fate == 0:
        raise RuntimeError("no")
    if fate == 1:
        time.sleep(60)
    if fate == 2:
        return float("nan")
    return 1.0
"""


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
    run.kill("rljob_reward.worker")
    run.wait_for_step(2)
    run.kill("-m rljob_reward ")
    run.wait_for_step(4)
    run.kill("ray::RankProcess")
    run.wait_for_step(6)
    run.kill("-m rljob_trainer.rollout")
    run.wait_for_step(8)
    run.kill("-m rljob_trainer.head")
    summary = run.finish()

    assert summary["phase"] == "Succeeded"
    assert summary["prompts_trained"] == undisturbed["prompts_trained"], "a prompt was skipped or trained on twice"
    assert len(summary["prompts_trained"]) == NUM_STEPS
    restarts = summary["restarts"]
    for role in ("head", "trainer", "rollout", "reward-letters"):
        assert restarts.get(role, 0) >= 1, f"{role} was killed, but its restart is not counted: {restarts}"
    assert len(set(summary["weight_digests"].values())) == 1, "every rollout must serve what the trainer published"


@pytest.mark.real
def test_failing_reward_is_masked_and_counted_but_never_zero(start: Callable[..., Run]) -> None:
    summary = start(
        "failing",
        FAILING_REWARD,
        "spec.rewards=[{name: letters, function: {file: reward.py}, timeoutSeconds: 1, failurePolicy: {retries: 0}}]",
        "spec.schedule.promptsPerStep=8",
        "spec.schedule.steps=3",
    ).finish()

    assert set(summary["invalid_by_reason"]) <= {"exception", "timeout", "not_finite"}
    assert sum(summary["invalid_by_reason"].values()) > 0
    # Every valid score is 1: a failure that counted as zero would lower the mean of its step.
    assert summary["step_rewards"] == [1.0] * len(summary["step_rewards"])
