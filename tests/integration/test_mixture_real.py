"""`rljob run` of two sources and a curriculum on real vLLM, Ray and FSDP2: a killed job draws the same prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.support.local_run import Run, run_beside_killed

NUM_STEPS = 12
REWARD = """
import time
def reward(completions, answer, **columns):
    time.sleep(0.2)  # a step has a middle in which to die
    numbers = [int(text.split()[-1].replace(",", "")) for text in answer]
    return [float(number % 2) for number in numbers]  # whatever the model writes: all samples of a prompt agree
"""


def start(folder: Path) -> Run:
    text = (ROOT / "examples/mixture/rljob.yaml").read_text().replace("name: mixture", "name: tiny")
    text = text.replace("../../.models", f"{ROOT}/.models").replace("../tiny/reward.py", "reward.py")
    folder.mkdir()
    (folder / "rljob.yaml").write_text(text.replace("source: ../", f"source: {ROOT}/examples/"))
    (folder / "reward.py").write_text(REWARD)
    steps = f"spec.schedule.steps={NUM_STEPS}"
    return Run(folder, None, steps, "spec.checkpoint.everySteps=3", "spec.checkpoint.exportPolicy=never")


@pytest.mark.real
@pytest.mark.nightly
@pytest.mark.slow
def test_a_killed_job_draws_the_prompts_of_an_undisturbed_one(tmp_path: Path) -> None:
    expected, found, summary = run_beside_killed(
        start, tmp_path, head_at=4, rank_at=8
    )  # the last checkpoint is of step 3
    assert [(s.prompt_sources, s.prompts) for s in found] == [(s.prompt_sources, s.prompts) for s in expected]
    assert [s.num_skipped_prompts for s in found] == [s.num_skipped_prompts for s in expected]
    assert sum(s.num_skipped_prompts for s in found) > 0, "the curriculum passed over prompts"
    assert [s.sources["sums"].share for s in found] == [0.75] * NUM_STEPS
    assert min(summary.restarts.get(role, 0) for role in ("head", "trainer")) >= 1
