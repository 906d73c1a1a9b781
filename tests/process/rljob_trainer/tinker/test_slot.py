"""A client's adapter on real FSDP2 ranks, compared with plain peft and torch: losses, gradients, files, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import tinker_scenarios
from tests.support.rank_programs import run_forked
from tests.support.tinker_scenarios import LOSSES, MAX_RANK, MODELS, RANK, build_data

ALPHA = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_forked(tinker_scenarios.__name__, tmp_path_factory.mktemp("slot"))


def build_peft(folder: Path, adapters: dict[str, torch.Tensor]) -> tuple[Any, dict[str, torch.nn.Parameter]]:
    """The same model and adapters by peft alone, of the client's rank."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    modules = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in adapters})
    model = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=modules))
    trained = {n.replace(".default", ""): p for n, p in model.named_parameters() if p.requires_grad}
    for name, parameter in trained.items():
        parameter.data.copy_(cut(name, adapters[name]))
    return model, trained


def cut(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:RANK] if ".lora_A." in name else tensor[:, :RANK]


def rest(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[RANK:] if ".lora_A." in name else tensor[:, RANK:]


def score(model: Any, datum: dict[str, Any]) -> torch.Tensor:
    logits = model(torch.tensor([datum["tokens"].tolist()])).logits[0]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(datum["targets"].tolist())[:, None])[:, 0]


def plain_loss(name: str, logprobs: torch.Tensor, datum: dict[str, Any]) -> torch.Tensor:
    weights, advantages, sampled = (torch.from_numpy(datum[key]) for key in ("weights", "advantages", "logprobs"))
    ratio = torch.exp(logprobs - sampled)
    if name == "cross_entropy":
        return -(weights * logprobs).sum()
    if name == "importance_sampling":
        return -(ratio * advantages).sum()
    if name == "dro":
        return -(logprobs * advantages - 0.5 * 0.05 * (logprobs - sampled) ** 2).sum()
    clipped = torch.clamp(ratio, 0.8, 1.2)
    if name == "ppo":
        return -torch.min(ratio * advantages, clipped * advantages).sum()
    return -(clipped.detach() * logprobs * advantages).sum()


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradients_equal_those_of_plain_torch(loss, num_ranks, folder, outcome):
    model, trained = build_peft(folder, outcome("start", num_ranks)["adapters"])
    data = build_data()
    logprobs = [score(model, datum) for datum in data]
    total = sum(plain_loss(loss, values, datum) for values, datum in zip(logprobs, data, strict=True))
    total.backward()
    ours = outcome(loss, num_ranks)
    assert ours["total"] == pytest.approx(total.item(), rel=1e-6, abs=1e-5)
    for found in (ours["found"], ours["scored"]):
        assert found
        for index, values in found.items():
            assert torch.allclose(torch.from_numpy(values), logprobs[index], atol=1e-5)
    assert ours["gradients"].keys() == trained.keys()
    for name, parameter in trained.items():
        difference = cut(name, ours["gradients"][name]) - parameter.grad
        assert difference.norm() < 1e-5 * parameter.grad.norm(), name
        assert not rest(name, ours["gradients"][name]).any(), f"{name}: what is beyond the client's rank has a gradient"


def test_a_new_adapter_has_the_clients_rank_and_is_the_same_on_any_number_of_ranks(outcome):
    one, two = outcome("created", 1)["adapters"], outcome("created", 2)["adapters"]
    for name, tensor in one.items():
        assert torch.equal(two[name], tensor), name
        assert MAX_RANK in tensor.shape
        assert not rest(name, tensor).any()
        assert bool(cut(name, tensor).any()) == (".lora_A." in name)
        if ".lora_A." in name:
            bound = tensor.shape[1] ** -0.5
            assert 0.9 * bound < tensor.abs().max() <= bound


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_peft_loads_the_files_and_rollouts_get_the_same_adapter(num_ranks, folder, outcome):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    saved = outcome("saved", num_ranks)
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, folder / f"adapter-{num_ranks}")
    for index, values in saved["scored"].items():
        assert torch.allclose(torch.from_numpy(values), score(model, build_data()[index]), atol=1e-5)
    for name, tensor in saved["scaled"].items():
        assert torch.equal(saved["published"][name], tensor), name


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_checkpoint_continues_with_its_optimizer_state_or_without(num_ranks, outcome):
    saved, loaded = outcome("saved", num_ranks), outcome("loaded", num_ranks)
    for name, tensor in saved["adapters"].items():
        assert torch.equal(loaded["loaded"][name], tensor), name
        assert torch.equal(loaded["only"][name], tensor), name
    assert set(loaded["steps"]) == {1}
    before, after = loaded["norms"]
    assert after == pytest.approx(before, rel=1e-6), "the same update has another gradient"
    assert loaded["num_updates"] == 2
    assert not any(loaded["without"]), "the optimizer's state is not the client's"


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_a_model_beside_others_is_bit_by_bit_the_one_alone(model, num_ranks, outcome):
    (alone, num_updates, scale), together = outcome("alone", num_ranks)[model], outcome("together", num_ranks)[model]
    assert together[1:] == (num_updates, scale) == (3, ALPHA / MODELS[model][0])
    for name, tensor in alone.items():
        assert tensor.any(), name
        assert torch.equal(together[0][name], tensor), name
