"""Adapters on real FSDP2 ranks, compared with plain peft: gradients, what is published, checkpoints and the export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from tests.support import lora_scenarios, policy_scenarios
from tests.support.rank_programs import run_forked
from tests.support.reference_trainer import ReferenceTrainer

MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_forked(lora_scenarios.__name__, tmp_path_factory.mktemp("lora"))


def build_peft(folder: Path, modules: list[str]) -> Any:
    """The same model and adapters by peft alone."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    rank, alpha = lora_scenarios.LORA["rank"], lora_scenarios.LORA["alpha"]
    model = get_peft_model(base, LoraConfig(r=rank, lora_alpha=alpha, target_modules=modules))
    for name, parameter in trained(model):
        parameter.data.copy_(lora_scenarios.initial_adapter(name, tuple(parameter.shape)))
    return model


def trained(model: Any) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name.replace(".default", ""), p) for name, p in model.named_parameters() if p.requires_grad]


CASES = {
    "plain": (policy_scenarios.PLAIN, MODULES),
    "accumulated": (policy_scenarios.PLAIN, MODULES),
    "recomputed": (policy_scenarios.PLAIN, MODULES),
    "one-module": (policy_scenarios.PLAIN, ["q_proj"]),
    "everything": (policy_scenarios.EVERYTHING, MODULES),
    "reduced": (policy_scenarios.EVERYTHING, MODULES),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_equal_those_of_peft(name, folder, outcome):
    algorithm, modules = CASES[name]
    everything = algorithm is policy_scenarios.EVERYTHING
    trainer = ReferenceTrainer(folder, algorithm)
    trainer.model, rows = build_peft(folder, modules), policy_scenarios.build_rows()
    rows = policy_scenarios.at_temperatures(rows) if everything else rows
    versions = policy_scenarios.LATER if everything else policy_scenarios.FIRST
    loss = trainer.loss(rows, versions, policy_scenarios.denominator(rows))
    loss.backward()
    expected = dict(trained(trainer.model))
    norm = torch.nn.utils.clip_grad_norm_(expected.values(), algorithm.optimizer.max_grad_norm)
    for num_ranks in (1, 2):
        ours = outcome(name, num_ranks)
        assert ours["metrics"].loss == pytest.approx(loss.item(), abs=1e-5)
        assert ours["metrics"].grad_norm == pytest.approx(norm.item(), abs=1e-5)
        assert ours["gradients"].keys() == expected.keys()
        for key, parameter in expected.items():
            difference = ours["gradients"][key] - parameter.grad
            assert difference.abs().max() < 1e-5, key
            assert difference.norm() < 1e-4 * parameter.grad.norm(), f"{key}: small gradients must be right, too"


def test_a_new_adapter_changes_nothing_and_is_the_same_on_any_number_of_ranks(outcome, folder):
    one, two = outcome("start", 1), outcome("start", 2)
    assert one["adapters"].keys() == two["adapters"].keys()
    for key, tensor in one["adapters"].items():
        assert torch.equal(two["adapters"][key], tensor), key
        assert bool(tensor.any()) == (".lora_A." in key)
    base = ReferenceTrainer(folder, policy_scenarios.PLAIN).model
    for key, parameter in base.named_parameters():
        assert torch.equal(one["weights"][key], parameter), key


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", ["plain", "reduced"])
def test_merged_weights_are_those_of_the_model_plus_the_update(name, num_ranks, folder, outcome):
    plain = outcome(name, num_ranks)
    base = dict(ReferenceTrainer(folder, policy_scenarios.PLAIN).model.named_parameters())
    assert plain["weights"].keys() == base.keys()
    num_adapted = 0
    for key, parameter in base.items():
        prefix = "base_model.model." + key.removesuffix(".weight")
        if f"{prefix}.lora_A.weight" not in plain["adapters"]:
            assert torch.equal(plain["weights"][key], parameter), key
            continue
        a, b = (plain["adapters"][f"{prefix}.lora_{side}.weight"] for side in "AB")
        assert torch.equal(plain["weights"][key], parameter + lora_scenarios.SCALE * (b @ a)), key
        assert not torch.equal(plain["weights"][key], plain["before"][key])
        num_adapted += 1
    assert num_adapted == 2 * len(MODULES)
    merged = build_peft(folder, MODULES).merge_and_unload()
    for key, parameter in merged.named_parameters():
        assert torch.allclose(plain["before"][key], parameter, atol=1e-6), f"{key}: peft merges something else"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_base_weights_have_the_compute_dtype_and_neither_gradient_nor_state(num_ranks, outcome):
    half = outcome("half", num_ranks)
    assert half["frozen"]
    assert {(dtype, gradient) for dtype, gradient in half["frozen"]} == {(torch.bfloat16, None)}
    assert len(half["states"]) == len(half["adapters"]) == 2 * 2 * len(MODULES)
    assert {dtype for _, *dtypes in half["states"] for dtype in dtypes} == {torch.float32}, (
        "of the adapter and of its moments"
    )
    assert {tensor.dtype for tensor in half["weights"].values()} == {torch.bfloat16}


def test_reference_model_is_the_model_without_adapters(outcome):
    """The equality of `everything` with peft shows that it is the right one."""
    assert not outcome("everything", 2)["is_reference_copied"]


def test_published_adapters_have_scale_one_and_the_compute_dtype(outcome):
    for num_ranks in (1, 2):
        found = outcome("published", num_ranks)
        assert found["published"].keys() == found["adapters"].keys()
        for key, tensor in found["adapters"].items():
            factor = lora_scenarios.SCALE if ".lora_B." in key else 1
            assert torch.equal(found["published"][key], (tensor * factor).bfloat16()), key


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_checkpoint_has_the_adapters_alone(num_ranks, folder):
    """test_checkpoints resumes from such ones."""
    saved = FileSystemReader(folder / f"checkpoint-{num_ranks}" / "trainer").read_metadata().state_dict_metadata
    parameters = [key for key in saved if key.startswith("model.")]
    assert len(parameters) == 2 * 2 * len(MODULES)
    assert all(".lora_" in key for key in saved if key.startswith(("model.", "optimizer.state.")))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_exported_adapter_loads_with_peft_and_equals_the_exported_model(num_ranks, folder, outcome):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    export = folder / f"export-{num_ranks}"
    merged = AutoModelForCausalLM.from_pretrained(export)
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, export / "adapter")
    assert adapted.peft_config["default"].base_model_name_or_path == str(folder / "model")
    tokens = torch.arange(3, 60)[None]
    with torch.no_grad():
        assert torch.allclose(adapted(tokens).logits, merged(tokens).logits, atol=1e-5)
        with adapted.disable_adapter():
            assert not torch.allclose(adapted(tokens).logits, merged(tokens).logits, atol=1e-2)
    files = {path.name: path.stat().st_mode & 0o777 for path in (export / "adapter").iterdir()}
    assert files == {"adapter_config.json": 0o644, "adapter_model.safetensors": 0o644}
