"""`rljob run` with a warm start on real vLLM, Ray and FSDP2: a job that is killed in it trains the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.paths import ROOT
from tests.support.local_run import Run, run_beside_killed

NUM_WARM, NUM_STEPS = 30, 32


def start(folder: Path, *changes: tuple[str, str], num_warm: int = NUM_WARM, num_steps: int = NUM_STEPS) -> Run:
    """`changes`: of the job's text."""
    text = (ROOT / "examples/quickstart/warm-start.yaml").read_text()
    for change in changes:
        text = text.replace(*change)
    text = text.replace("name: warm-start", "name: tiny").replace("./data", f"{ROOT}/examples/quickstart/data")
    text = text.replace("../../.models/smollm2-135m-instruct", f"{ROOT}/.models/tiny-qwen3")
    folder.mkdir()
    (folder / "rljob.yaml").write_text(text)
    (folder / "reward.py").write_text((ROOT / "examples/quickstart/reward.py").read_text())
    schedule = {"steps": num_steps, "warmStart.steps": num_warm, "warmStart.learningRate": 1e-3}
    settings = [f"spec.schedule.{name}={value}" for name, value in schedule.items()]
    return Run(folder, None, *settings, "spec.checkpoint.everySteps=2", "spec.evaluation.everySteps=0")


@pytest.mark.real
@pytest.mark.slow
def test_a_job_killed_in_its_warm_start_trains_the_weights_of_an_undisturbed_one(tmp_path: Path) -> None:
    expected, found, summary = run_beside_killed(start, tmp_path, head_at=5, rank_at=11)
    assert [step.prompts for step in found] == [step.prompts for step in expected]
    assert [step.num_samples for step in found] == [0] * NUM_WARM + [64] * (NUM_STEPS - NUM_WARM)
    digests = [[step.weight_digest for step in steps[:NUM_WARM]] for steps in (expected, found)]
    assert digests[0] == digests[1], "the weights of each step are equal, bit by bit"
    assert len(set(digests[0])) == NUM_WARM
    assert found[NUM_WARM - 1].loss < found[0].loss / 2
    assert found[-1].logprob_difference < 0.05, "rollouts sampled with the weights of the warm start"
    assert min(summary.restarts.get(role, 0) for role in ("head", "trainer")) >= 1


@pytest.mark.real
@pytest.mark.slow
def test_a_job_without_prompts_trains_the_same_model_without_rollouts_and_rewards(tmp_path: Path) -> None:
    text = (ROOT / "examples/quickstart/warm-start.yaml").read_text()
    rewards = text[text.index("  rewards:") : text.index("  algorithm:")]
    prompts = [line for line in text.splitlines(keepends=True) if line.strip().startswith(("train: {", "eval: {"))]
    removed = [(part, "") for part in (*prompts, rewards, "accuracy: exact")]
    exports = []
    for name, changes in (("beside", []), ("alone", removed)):
        run = start(tmp_path / name, *changes, num_warm=3, num_steps=3)
        try:
            summary = run.finish()
        finally:
            run.close()
        assert (summary.steps, any((run.folder / "logs").glob("*rollout*"))) == (3, name == "beside")
        exports.append(load_file(run.folder / "export/model.safetensors"))
    assert exports[0].keys() == exports[1].keys()
    assert all(torch.equal(exports[0][key], exports[1][key]) for key in exports[0])
