"""Exports under transformers 4, in an environment of its own: the same logits, tokens and prompts as here."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch

from rljob_service.pool.requirements import find_uv
from rljob_trainer.policy.checkpoints import save_chat, write_config
from tests.support import older_reader
from tests.support.chat_templates import FAMILIES, build_tokenizer
from tests.support.tiny_models import MODELS, build_model

pytestmark = [pytest.mark.slow, pytest.mark.packages]

VERSION = "4.57.1"
THETA = 31_000.0
NUM_TOKENS = 96
TOLERANCES = {"ApertusForCausalLM": 5e-3}
"""Its activation is computed otherwise in transformers 4."""
OTHERS = {"GraniteMoeHybridForCausalLM": "layer_types must be a list"}
"""What transformers 5 writes for its types of layers, transformers 4 refuses. A source of transformers 4 stays."""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Python with transformers 4 and the torch of the tests."""
    uv, folder = find_uv(), tmp_path_factory.mktemp("older") / "env"
    if uv is None:
        pytest.skip("needs uv on the PATH")
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, folder], check=True)
    python = folder / "bin/python"
    packages = [f"transformers=={VERSION}", "jinja2"]
    subprocess.run([uv, "pip", "install", "--quiet", "--python", python, *packages], check=True)
    found = next(folder.glob("lib/*/site-packages"))
    (found / "rest.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python


@torch.no_grad()
def write_export(name: str, folder: Path) -> dict[str, Any]:
    """Write an export of a tiny model whose positions are not the default ones, and what is computed with it here."""
    model = build_model(name)
    folder.mkdir()
    for part in (model.config, model.config.get_text_config()):
        rope = getattr(part, "rope_parameters", None) or {}
        for each in (rope, *rope.values()):
            if isinstance(each, dict) and "rope_theta" in each:
                each["rope_theta"] = THETA
    model.save_pretrained(folder)
    (folder / "expected.pt").touch()
    tokenizer = copy.deepcopy(build_tokenizer())
    is_tied = bool(model.all_tied_weights_keys)
    write_config(folder, model.config, "float32", type(model).__name__, is_tied=is_tied)
    save_chat(folder, tokenizer, None, chat_template=FAMILIES["smollm2"], stop=())
    again = type(model).from_pretrained(folder, attn_implementation="eager").eval()
    ids = torch.randint(3, 500, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(0))
    torch.save({"ids": ids, "logits": again(ids).logits}, folder / "expected.pt")
    prompt = tokenizer.apply_chat_template(older_reader.MESSAGES, tokenize=False, add_generation_prompt=True)
    return {"ids": tokenizer(older_reader.TEXT)["input_ids"], "prompt": prompt}


def test_exports_compute_and_render_the_same_under_transformers_4(python: Path, tmp_path: Path) -> None:
    expected = {name: write_export(name, tmp_path / name) for name in MODELS}
    command = [python, older_reader.__file__, *(tmp_path / name for name in MODELS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [json.loads(line.removeprefix("READ ")) for line in done.stdout.splitlines() if line.startswith("READ ")]
    assert len(lines) == len(MODELS), done.stderr[-4000:]
    read = {line.pop("name"): line for line in lines}
    for name, error in OTHERS.items():
        assert error in read.pop(name)["error"]
    known = {name: found for name, found in read.items() if not found.get("unknown")}
    assert {name: found.get("error") for name, found in known.items() if "error" in found} == {}
    assert len(known) > len(MODELS) / 2
    differences = {name: found.pop("difference") for name, found in known.items()}
    assert {name: each for name, each in differences.items() if each > TOLERANCES.get(name, 1e-4)} == {}
    assert known == {name: expected[name] for name in known}
