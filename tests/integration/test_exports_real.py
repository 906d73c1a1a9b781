"""What the trainer exports, in a real vLLM: experts, the adapter on its base model, and the merged model.

Everything is fp32, so that Hugging Face's forward of the export is an exact reference.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.paths import ROOT
from tests.support import export_scenarios, serve_export
from tests.support.rank_programs import run_forked

pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_forked(export_scenarios.__name__, tmp_path_factory.mktemp("exports"))


def serve(model: Path, adapter: Path | None = None) -> dict[str, Any]:
    command = [sys.executable, "-m", serve_export.__name__, str(model), *([str(adapter)] if adapter else [])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@torch.no_grad()
def reference(model: Path) -> dict[str, Any]:
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokens: list[int] = []
    logprobs: list[float] = []
    for _ in range(serve_export.NUM_TOKENS):
        scores = network(torch.tensor([serve_export.PROMPT + tokens])).logits[0, -1].log_softmax(-1)
        tokens.append(int(scores.argmax()))
        logprobs.append(float(scores[tokens[-1]]))
    return {"tokens": tokens, "logprobs": logprobs}


def test_exported_experts_are_served(folder: Path) -> None:
    served, expected = serve(folder / "experts-export-1"), reference(folder / "experts-export-1")
    assert served["tokens"] == expected["tokens"]
    assert served["logprobs"] == pytest.approx(expected["logprobs"], abs=1e-4)


def test_exported_adapter_is_served_as_the_merged_export(folder: Path) -> None:
    base, merged = folder / "adapters" / "model", folder / "adapters-export-1"
    served, expected = serve(base, merged / "adapter"), reference(merged)
    assert served["tokens"] == expected["tokens"]
    assert served["logprobs"] == pytest.approx(expected["logprobs"], abs=1e-4)
    without = reference(base)
    difference = torch.tensor(without["logprobs"]) - torch.tensor(expected["logprobs"])
    assert difference.abs().max() > 0.01, "the adapter changes nothing, so this shows nothing"
