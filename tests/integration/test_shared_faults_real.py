"""`rljob run` with trainer and rollouts in turns, on real vLLM, Ray and FSDP2, with SIGKILL in both turns.

Two trainer Pods, each with an engine. The job trains on the same prompts as one with rollouts in a Pod of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rljob_api.run.folder import FILE_METRICS
from rljob_api.run.metrics import read_metrics
from tests.support.local_run import SLOW_REWARD, Run

NUM_STEPS = 8
SETTINGS = (f"spec.schedule.steps={NUM_STEPS}", "spec.schedule.type=synchronous", "spec.checkpoint.everySteps=3")
ENGINE = "-m rljob_trainer.rollout"


def wait_for_turn(run: Run, turn: str) -> None:
    """Wait until the first Pod's engine is asked to begin its next `turn`."""
    log = run.folder / "logs" / "tiny-trainer-0.log"

    def count() -> int:
        return log.read_text().count(f"turn: {turn}")

    before = count()
    run.wait_for(f"turn: {turn}", lambda: count() > before)


@pytest.fixture(scope="module")
def separate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[list[int]]]:
    """The prompts on which each step of the same job without shared devices trains."""
    with closing(Run(tmp_path_factory.mktemp("separate"), SLOW_REWARD, *SETTINGS)) as run:
        yield run.finish().prompts_trained


@pytest.mark.real
@pytest.mark.slow
def test_kills_in_both_turns_skip_and_repeat_no_prompt(separate: list[list[int]], tmp_path: Path) -> None:
    with closing(Run(tmp_path, SLOW_REWARD, *SETTINGS, "spec.rollout.placement=trainer")) as run:
        run.wait_for_step(1)
        wait_for_turn(run, "rollouts")
        run.kill(ENGINE)  # awake, or in the hand-over
        run.wait_for_step(2)
        wait_for_turn(run, "trainer")
        run.kill(ENGINE)  # asleep
        run.wait_for_step(4)
        run.kill("ray::RankProcess")
        run.wait_for_step(6)
        run.kill("-m rljob_trainer.head")
        summary = run.finish()
        steps = read_metrics(run.folder / FILE_METRICS).steps

    assert summary.prompts_trained == separate, "a prompt was skipped, trained on twice, or in another order"
    restarts = summary.restarts
    # The dead driver may not have saved that the ranks had died.
    assert (restarts["head"], restarts["trainer"] <= 1, "rollout" in restarts) == (1, True, False), "by dead engines"
    assert len(set(summary.weight_digests.values())) == 1
    assert sum(step.num_engine_restarts for step in steps) >= 1
