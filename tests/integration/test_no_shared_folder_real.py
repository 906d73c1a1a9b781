"""`rljob run` whose trainers do not see the run's folder, as on a cluster without a claim: the head has them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from tests.support.local_run import SLOW_REWARD, Run

NUM_STEPS = 8
# Python imports this module at the start of each process of the trainer's Pod.
HIDE_FOLDER = """
from pathlib import Path
from rljob_trainer.run_folder.location import RunFolder

def is_visible(self):
    Path({marker!r}).touch()
    return False

RunFolder.is_visible = is_visible
"""


@pytest.mark.real
@pytest.mark.slow
def test_killed_trainer_pod_costs_no_prompt_and_the_model_is_exported(tmp_path: Path) -> None:
    (tmp_path / "hidden").mkdir()
    marker = tmp_path / "asked"
    (tmp_path / "hidden" / "sitecustomize.py").write_text(HIDE_FOLDER.format(marker=str(marker)))
    run = Run(
        tmp_path,
        SLOW_REWARD,
        f"spec.schedule.steps={NUM_STEPS}",
        "spec.checkpoint.everySteps=2",
        f"spec.trainer.env.PYTHONPATH={tmp_path / 'hidden'}",
    )
    try:
        run.wait_for_step(3)
        run.kill("-m rljob_trainer.worker")
        run.wait_for_step(6)
        run.kill("ray::RankProcess")
        summary = run.finish()
    finally:
        run.close()
    assert marker.exists(), "the ranks saw the folder"
    assert summary.phase == "Succeeded"
    assert len(summary.prompts_trained) == NUM_STEPS
    trained = list(itertools.chain(*summary.prompts_trained))
    assert len(trained) == len(set(trained)), "a prompt was trained on twice"
    assert summary.restarts["trainer"] >= 2
    assert (run.folder / f"checkpoints/step-{NUM_STEPS:06d}/trainer/.metadata").is_file()
    assert "model_type" in json.loads((run.folder / "export/config.json").read_text())
