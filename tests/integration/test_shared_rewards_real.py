"""`rljob run` with a reward model in the trainer's Pod, on real vLLM, Ray and FSDP2, with SIGKILL in both turns."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from rljob_api.run.folder import FILE_METRICS
from rljob_api.run.metrics import read_metrics
from tests.paths import ROOT
from tests.support.local_run import QUICKSTART, Run, wait_for_turn

EXAMPLE = ROOT / "examples/shared-reward/rljob.yaml"
ENGINE = "-m rljob_trainer.rollout.served"
NUM_STEPS = 6


@pytest.mark.real
@pytest.mark.slow
def test_reward_model_that_sleeps_and_dies_scores_every_sample(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "examples/prepare.py", "shared-reward"], check=True)
    text = EXAMPLE.read_text().replace("../../.models", f"{ROOT}/.models").replace("../quickstart", str(QUICKSTART))
    text = text.replace("../tiny", f"{ROOT}/examples/tiny").replace("name: shared-reward", "name: tiny")
    (tmp_path / "rljob.yaml").write_text(text)
    with closing(Run(tmp_path, None, f"spec.schedule.steps={NUM_STEPS}")) as run:
        run.wait_for_step(1)
        wait_for_turn(run, "rollouts")
        run.kill(ENGINE)  # awake
        run.wait_for_step(3)
        wait_for_turn(run, "trainer")
        run.kill(ENGINE)  # asleep
        summary = run.finish()
        steps = read_metrics(run.folder / FILE_METRICS).steps

    assert (summary.phase, summary.restarts["trainer"]) == ("Succeeded", 0), "an engine costs no Pod"
    assert steps[-1].num_engine_restarts == 2
    assert [(step.num_invalid, step.num_masked) for step in steps] == [(0, 0)] * NUM_STEPS
    assert all("preference" in step.components for step in steps)
    held = [step.device_bytes["models_asleep"] for step in steps]
    assert held[0] > 0, "the model is asleep while the trainer works"
    assert held[-1] > 0, "also after its engine was killed twice"
    assert len(set(summary.weight_digests.values())) == 1
