"""`rljob run` of examples/distill with tiny models, on real vLLM, Ray and FSDP2."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from rljob_api.run.folder import FILE_METRICS
from rljob_api.run.metrics import read_metrics
from tests.paths import ROOT
from tests.support.local_run import QUICKSTART, Run


@pytest.mark.real
@pytest.mark.slow
def test_the_policy_itself_as_its_teacher_has_nothing_to_teach(tmp_path: Path) -> None:
    """Its log-probs are the rollout's, token by token: a difference would show another token, or another place. After a
    hint, which the rollouts themselves read, they are others."""
    text = (ROOT / "examples/distill/rljob.yaml").read_text().replace("name: distill", "name: tiny")
    for name in ("smollm2-135m-instruct", "smollm2-135m-sums"):
        text = text.replace(f"../../.models/{name}", f"{ROOT}/.models/tiny-qwen3")
    hinted = '  - {name: hinted, use: training, teacher: {hint: "{answer}! "}}\n  - name: correct'
    text = text.replace("  - name: correct", hinted)
    (tmp_path / "rljob.yaml").write_text(text.replace("../quickstart", str(QUICKSTART)))
    exact = ("trainer.dtype=float32", "rewards[0].teacher.model.dtype=float32", "rollout.extraArgs=[--dtype, float32]")
    small = ("schedule.steps=3", "trainer.replicas=1", "data.eval.limit=4", "checkpoint.exportPolicy=never")
    with closing(Run(tmp_path, None, *(f"spec.{each}" for each in (*exact, *small)))) as run:
        summary = run.finish()
        steps = read_metrics(run.folder / FILE_METRICS).steps
    assert summary.phase == "Succeeded"
    assert [(step.num_invalid, step.num_masked) for step in steps] == [(0, 0)] * 3
    assert abs(steps[0].rewards["teacher"] or 0.0) < 1e-4
    assert 1e-3 < abs(steps[0].rewards["hinted"] or 0.0) < 20
    assert steps[0].reward == pytest.approx(sum(each or 0.0 for each in steps[0].rewards.values())), "alone, the score"
