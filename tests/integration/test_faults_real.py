"""`rljob run` on real vLLM, Ray and FSDP2 with faults: SIGKILL of every role during a step.

Resume is exact: the job succeeds, and trains on the prompts of an undisturbed run, which follow from its seed. So it is
where the trainers do not see the run's folder, as on a cluster without a claim, and where trainer and rollouts share
devices in turns.
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from rljob_api.run.folder import FILE_METRICS
from rljob_api.run.metrics import read_metrics
from tests.support.local_run import SLOW_REWARD, Run, wait_for_turn
from tests.support.prompt_order import expect_prompts

pytestmark = [pytest.mark.real, pytest.mark.slow]
NUM_STEPS = 12
SETTINGS = (f"spec.schedule.steps={NUM_STEPS}", "spec.schedule.type=synchronous", "spec.checkpoint.everySteps=3")
# Python imports this module at the start of each process of the trainer's Pod.
HIDE_FOLDER = """
from pathlib import Path
from rljob_trainer.run_folder.client import RunFolder

def is_visible(self):
    Path({marker!r}).touch()
    return False

RunFolder.is_visible = is_visible
"""
ENGINE = "-m rljob_trainer.rollout"
UNDISTURBED = expect_prompts(NUM_STEPS, prompts_per_step=4)


def test_sigkill_of_each_role_skips_and_repeats_no_prompt(tmp_path: Path) -> None:
    (tmp_path / "hidden").mkdir()
    marker = tmp_path / "asked"
    (tmp_path / "hidden" / "sitecustomize.py").write_text(HIDE_FOLDER.format(marker=str(marker)))
    hidden = f"spec.trainer.env.PYTHONPATH={tmp_path / 'hidden'}"
    with closing(Run(tmp_path, SLOW_REWARD, *SETTINGS, hidden)) as run:
        run.wait_for_step(1)
        run.kill("rljob_service.worker")
        run.wait_for_step(2)
        run.kill("-m rljob_service ")
        run.wait_for_step(4)
        run.kill("ray::RankProcess")
        run.wait_for_step(6)
        run.kill(ENGINE)
        run.wait_for_step(7)
        run.kill("-m rljob_trainer.worker")
        run.wait_for_step(9)
        run.kill("-m rljob_trainer.head")
        summary = run.finish()

    assert marker.exists(), "the ranks saw the folder"
    assert summary.phase == "Succeeded"
    assert summary.prompts_trained == UNDISTURBED, "a prompt was skipped or trained on twice"
    assert len(summary.prompts_trained) == NUM_STEPS
    restarts = summary.restarts
    for role in ("head", "trainer", "rollout", "reward-letters"):
        assert restarts.get(role, 0) >= 1, f"{role} was killed, but its restart is not counted: {restarts}"
    assert len(set(summary.weight_digests.values())) == 1, "every rollout must serve what the trainer published"
    assert (run.folder / f"checkpoints/step-{NUM_STEPS:06d}/trainer/.metadata").is_file()
    assert "model_type" in json.loads((run.folder / "export/config.json").read_text())


@pytest.mark.nightly
def test_kills_in_both_turns_skip_and_repeat_no_prompt(tmp_path: Path) -> None:
    """Two trainer Pods, each with an engine."""
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

    assert summary.prompts_trained == UNDISTURBED, "a prompt was skipped, trained on twice, or in another order"
    restarts = summary.restarts
    # The dead driver may not have saved that the ranks had died.
    assert (restarts["head"], restarts["trainer"] <= 1, "rollout" in restarts) == (1, True, False), "by dead engines"
    assert len(set(summary.weight_digests.values())) == 1
    assert sum(step.num_engine_restarts for step in steps) >= 1
