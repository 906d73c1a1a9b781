"""Recipes of tinker-cookbook from PyPI, unchanged, each of which changes the weights of the service.

Offline: the tokenizer and the data sets are folders of their names in the working directory. The cookbook names a
version of one package that indexes may lack, so that it is installed without what it does not import here.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rljob_service.pool.requirements import find_uv
from tests.integration.training_service.conftest import NAME, RunningService
from tests.support.waiting import DEADLINE_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.packages]

PACKAGES = (
    *("tinker-cookbook==0.6.1", "chz==0.4.0", "blobfile==3.3.0", "pycryptodomex", "lxml", "termcolor"),
    *("math-verify==0.9.0", "latex2sympy2-extended==1.11.0", "antlr4-python3-runtime==4.13.2", "pylatexenc"),
)
STEPS = 2


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, uv = tmp_path_factory.mktemp("packages"), find_uv()
    assert uv is not None, "uv is not installed"
    install = [uv, "pip", "install", "--quiet", "--python", sys.executable, "--no-deps", "--target", str(folder)]
    subprocess.run([*install, *PACKAGES], check=True, timeout=DEADLINE_SECONDS)
    return folder


@pytest.fixture
def workspace(tmp_path: Path, service: RunningService) -> Path:
    """What the recipes would download."""
    tokenizer = tmp_path / NAME
    tokenizer.mkdir(parents=True)
    for each in service.model.glob("*.json*"):
        if "safetensors" not in each.name:
            shutil.copy(each, tokenizer)
    sums = [{"question": f"What is {i} + {3 - i}?", "answer": "It is 3.\n#### 3"} for i in range(3)] * 8
    write_dataset(tmp_path / "openai/gsm8k", "main", sums)
    talk = [
        {"messages": [{"role": "user", "content": f"Say {i}."}, {"role": "assistant", "content": f"It is {i}."}]}
        for i in range(24)
    ]
    write_dataset(tmp_path / "HuggingFaceH4/no_robots", "default", talk)
    return tmp_path


def write_dataset(folder: Path, name: str, rows: Sequence[object]) -> None:
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "test"))
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {name}\n  data_files:\n{files}---\n")


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("sl_loop", ("batch_size=4",)),
        ("rl_loop", ("batch_size=2", "group_size=8", "max_tokens=16", "loss_fn=importance_sampling")),
        ("rl_loop", ("batch_size=2", "group_size=8", "max_tokens=16", "loss_fn=cispo")),
    ],
    ids=["sl_loop", "rl_loop", "rl_loop with cispo"],
)
def test_a_recipe_changes_the_weights(recipe, settings, packages, workspace, service):
    module, log = f"tinker_cookbook.recipes.{recipe}", workspace / "log"
    common = (f"model_name={NAME}", f"max_steps={STEPS}", "lora_rank=4", "learning_rate=1e-3", f"log_path={log}")
    environment = {"PYTHONPATH": str(packages), "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(workspace / "cache")}
    done = subprocess.run(
        [sys.executable, "-m", module, *common, *settings],
        cwd=workspace,
        env={**service.environment("ann"), **environment},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    [saved] = [json.loads(line) for line in (log / "checkpoints.jsonl").read_text().splitlines()]
    model = saved["sampler_path"].removeprefix("tinker://").partition("/")[0]
    norms = re.findall(rf"model {re.escape(model)}: update \d+, norm of the gradient (\S+)", service.head_log)
    assert len(norms) >= (STEPS if recipe == "sl_loop" else 1), f"the service applied no update:\n{done.stdout[-3000:]}"
    assert all(float(norm) > 0 for norm in norms)
    tensors = load_file(service.checkpoint("ann", saved["sampler_path"]) / "adapter_model.safetensors")
    assert any(tensor.any() for name, tensor in tensors.items() if ".lora_B." in name), "the weights are the first ones"
