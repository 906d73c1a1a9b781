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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tinker
from safetensors.torch import load_file
from tinker import types

from rljob_service.pool.requirements import find_uv
from tests.integration.training_service.conftest import NAME, RunningService
from tests.support.waiting import DEADLINE_SECONDS, wait_for

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
    write_dataset(tmp_path / "zwhe99/DeepMath-103K", "default", sums)
    pages = [{"text": "Before it was known, many could be there, and most were later after all."}] * 3000
    write_dataset(tmp_path / "Salesforce/wikitext", "wikitext-103-raw-v1", pages)
    return tmp_path


def write_dataset(folder: Path, name: str, rows: Sequence[object]) -> None:
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "test"))
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {name}\n  data_files:\n{files}---\n")


class Recipes:
    """Runs recipes as client ann, and finds what the service did."""

    def __init__(self, packages: Path, workspace: Path, service: RunningService) -> None:
        self.packages, self.workspace, self.service = packages, workspace, service

    def run(self, recipe: str, *settings: str, steps: int = STEPS) -> tuple[str, list[float]]:
        """Return the path of the weights that it saved, and the norms of the gradients of its updates."""
        module, log = f"tinker_cookbook.recipes.{recipe}", self.workspace / "log"
        common = (f"model_name={NAME}", f"max_steps={steps}", "learning_rate=1e-3", f"log_path={log}")
        environment = {"PYTHONPATH": str(self.packages), "HF_DATASETS_CACHE": str(self.workspace / "cache")}
        done = subprocess.run(
            [sys.executable, "-m", module, *common, *settings],
            cwd=self.workspace,
            env={**self.service.environment("ann"), **environment, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        saved = json.loads((log / "checkpoints.jsonl").read_text().splitlines()[-1])["sampler_path"]
        model = saved.removeprefix("tinker://").partition("/")[0]
        pattern = rf"model {re.escape(model)}: update \d+, norm of the gradient (\S+)"
        norms = [float(norm) for norm in re.findall(pattern, self.service.head_log)]
        assert norms, f"the service applied no update:\n{done.stdout[-3000:]}"
        return saved, norms

    def has_changed(self, path: str) -> bool:
        """Whether the weights are not the first ones."""
        tensors = load_file(self.service.checkpoint("ann", path) / "adapter_model.safetensors")
        return any(tensor.any() for name, tensor in tensors.items() if ".lora_B." in name)


@pytest.fixture
def recipes(packages: Path, workspace: Path, service: RunningService) -> Recipes:
    return Recipes(packages, workspace, service)


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("sl_loop", ("batch_size=4",)),
        ("rl_loop", ("batch_size=2", "group_size=8", "max_tokens=16", "loss_fn=importance_sampling")),
        ("rl_loop", ("batch_size=2", "group_size=8", "max_tokens=16", "loss_fn=cispo")),
    ],
    ids=["sl_loop", "rl_loop", "rl_loop with cispo"],
)
def test_a_recipe_changes_the_weights(recipe, settings, recipes):
    saved, norms = recipes.run(recipe, "lora_rank=4", *settings)
    assert len(norms) >= (STEPS if recipe == "sl_loop" else 1)
    assert all(norm > 0 for norm in norms)
    assert recipes.has_changed(saved)


@pytest.mark.parametrize("recipe", ["sl_loop", "rl_loop"])
def test_a_recipe_does_not_notice_what_dies(recipe, recipes, service):
    def disturb() -> None:
        for name in ("ray::RankProcess", "VLLM::EngineCore", "rljob_trainer.tinker"):
            before = service.head_log.count(": update ")
            wait_for(lambda before=before: service.head_log.count(": update ") > before, "an update")
            service.kill(name)

    rl = ("batch_size=2", "group_size=8", "max_tokens=16", "loss_fn=importance_sampling")
    settings = rl if recipe == "rl_loop" else ("batch_size=4",)
    with ThreadPoolExecutor() as pool:
        disturbing = pool.submit(disturb)
        saved, _ = recipes.run(recipe, "lora_rank=4", *settings, steps=6)
        disturbing.result()
    model = saved.removeprefix("tinker://").partition("/")[0]
    updates = [int(each) for each in re.findall(rf"model {re.escape(model)}: update (\d+)", service.head_log)]
    assert set(updates) == set(range(1, updates[-1] + 1)), "what was done again has the same numbers"
    assert updates[-1] == 6 or recipe == "rl_loop", "a step was lost, or applied twice"
    assert recipes.has_changed(saved)


def test_a_student_is_distilled_from_its_first_weights(recipes, service):
    """It begins with other weights than its teacher's, so that there is something to learn."""
    client = tinker.ServiceClient(base_url=service.url, api_key=service.keys["ann"])
    training = client.create_lora_training_client(base_model=NAME, rank=4).result()
    inputs = {"target_tokens": [20, 21, 22], "weights": [1.0] * 3}
    datum = types.Datum(model_input=types.ModelInput.from_ints([19, 20, 21]), loss_fn_inputs=inputs)
    for _ in range(3):
        training.forward_backward([datum], "cross_entropy").result()
        training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    start = f"load_checkpoint_path={training.save_state('other').result().path}"
    sizes = ("lora_rank=4", "group_size=2", "groups_per_batch=4", "max_tokens=16", "eval_every=0")
    _, norms = recipes.run("distillation.on_policy_distillation", f"teacher_model={NAME}", start, *sizes)
    assert len(norms) == STEPS
    assert all(norm > 0 for norm in norms)


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("math_rl.train", ("env=arithmetic", "loss_fn=importance_sampling", "groups_per_batch=4", "lora_rank=4")),
        ("multiplayer_rl.guess_number.train", ("renderer_name=qwen3", "batch_size=2", "group_size=4", "max_tokens=16")),
        (
            "rl_numerics_check.train",
            (
                *("renderer_name=qwen3", "groups_per_batch=2", "group_size=2", "max_tokens=16", "lora_rank=4"),
                *("task.num_pages_min=1", "task.num_pages_max=2", "task.page_chars=200"),
            ),
        ),
    ],
    ids=["math_rl", "guess_number", "rl_numerics_check"],
)
def test_a_recipe_whose_rewards_this_model_never_gets_runs_to_its_end(recipe, settings, recipes):
    """All advantages are zero, so that the weights stay the first ones."""
    _, norms = recipes.run(recipe, "eval_every=0", *settings)
    assert len(norms) == STEPS
