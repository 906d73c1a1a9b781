"""`rljob evaluate` on real vLLM, without a trainer: two models on three sets, in one table.

The models are random and fp32, so that Hugging Face's forward is an exact reference: each answer shows whose weights
sampled it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rljob_api.run.comparisons import Comparison
from rljob_api.run.folder import TRAJECTORIES, list_trajectory_files
from tests.paths import ROOT

pytestmark = [pytest.mark.real, pytest.mark.slow]

RLJOB = Path(sys.executable).with_name("rljob")
TINY = ROOT / ".models" / "tiny-qwen3"
SECONDS = 900
MAX_TOKENS = 8
SETS = [
    {"name": "sampled", "samplesPerPrompt": 4, "sampling": {"temperature": 1.0, "maxTokens": MAX_TOKENS}},
    {"name": "seen", "sampling": {"temperature": 0.0, "maxTokens": MAX_TOKENS}},
]


def write_other(folder: Path) -> Path:
    """Write the tiny model with other weights."""
    torch.manual_seed(1)
    network = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    network.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return folder


@torch.no_grad()
def continue_greedily(model: Path, prompt: str) -> str:
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokens = tokenizer(prompt, return_tensors="pt").input_ids
    found = network.generate(tokens, max_new_tokens=MAX_TOKENS, do_sample=False)
    return tokenizer.decode(found[0, tokens.shape[1] :], skip_special_tokens=True)


def test_models_are_compared_on_sets_by_engines_with_their_own_weights(tmp_path: Path) -> None:
    sets = json.loads(json.dumps(SETS))
    for each, file in zip(sets, ("eval", "train"), strict=True):
        source = ROOT / f"examples/quickstart/data/{file}.jsonl"
        each["data"] = {"source": str(source), "prompt": "question", "limit": 4}
    models = [TINY, write_other(tmp_path / "other")]
    command = [RLJOB, "evaluate", ROOT / "examples/tiny/rljob.yaml", "--dir", tmp_path / "runs", "-o", "json"]
    command += [argument for model in models for argument in ("--model", model)]
    settings = {
        "spec.evaluation.sets": sets,
        "spec.data.eval.limit": 4,
        "spec.rollout.sampling.maxTokens": MAX_TOKENS,
        "spec.checkpoint.exportPolicy": "last",
    }
    command += [argument for path, value in settings.items() for argument in ("--set", f"{path}={json.dumps(value)}")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-8000:]
    result = json.loads(done.stdout)
    file = Path(result.pop("file"))
    comparison = Comparison.model_validate_json(file.read_text())
    assert result == comparison.model_dump(mode="json")
    for found, model in zip(comparison.models, models, strict=True):
        assert (found.model, found.phase) == (str(model), "Succeeded")
        keys = [(figure.set, figure.name, figure.num_prompts) for figure in found.figures]
        assert keys[0] == ("eval", "accuracy", 4)
        assert keys[1:5] == [("sampled", name, 4) for name in ("avg@4", "pass@1", "pass@2", "pass@4")]
        assert keys[-1] == ("seen", "accuracy", 4)
        assert found.run is not None
        [log] = list_trajectory_files(Path(found.run) / TRAJECTORIES)
        rows = pq.read_table(log.path).to_pylist()
        assert len(rows) == 4 + 4 * 4 + 4
        assert {row["weights"] for row in rows} == {"model:0"}
        greedy = [row for row in rows if row["set"] == "seen"]
        assert [row["completion"] for row in greedy] == [continue_greedily(model, row["prompt"]) for row in greedy]
        assert not (Path(found.run) / "checkpoints").exists()
        logs = {path.name for path in (Path(found.run) / "logs").iterdir()}
        assert not [name for name in logs if "trainer" in name], "no trainer starts"
