"""Which modules get an adapter. tests/process compares the rest with peft, on FSDP2 ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from rljob_api.errors import UserError
from rljob_trainer.policy.lora import adapter_name, find_targets, is_adapter


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"q_proj": nn.Linear(2, 2), "up_proj": nn.Linear(2, 2), "norm": nn.LayerNorm(2)})
            for _ in range(2)
        )
        self.embed_tokens = nn.Embedding(3, 2)
        self.lm_head = nn.Linear(2, 3)
        self.config = SimpleNamespace(model_type="llama")

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


def test_all_linear_is_every_linear_module_but_the_head():
    assert find_targets(Network(), ["all-linear"]) == ["q_proj", "up_proj"]
    assert find_targets(Network(), ["up_proj"]) == ["up_proj"]


@pytest.mark.parametrize("name", ["v_proj", "lm_head", "norm", "embed_tokens", "layers.0.q_proj"])
def test_module_that_cannot_have_an_adapter_is_refused_with_those_that_can(name):
    with pytest.raises(UserError) as caught:
        find_targets(Network(), ["q_proj", name])
    assert str(caught.value) == (
        "spec.trainer.lora.targetModules: the model has no linear module that can have an adapter called "
        f"{name}; it has q_proj, up_proj"
    )


def test_a_linear_module_with_another_result_gets_no_adapter():
    class Router(nn.Linear):
        def forward(self, states):
            return super().forward(states), None

    network = Network()
    network.layers[0]["router"] = Router(2, 2)
    assert find_targets(network, ["all-linear"]) == ["q_proj", "up_proj"]


@pytest.mark.parametrize(
    ("model_type", "targets"),
    [
        ("llama", ["out_proj", "q_proj", "up_proj"]),
        ("nemotron_h", ["q_proj", "up_proj"]),
        ("glm4_moe", ["out_proj", "q_proj"]),
    ],
)
def test_names_that_peft_cannot_load_get_no_adapter(model_type, targets):
    """peft takes up_proj of a mixture for its experts', and refuses out_proj of Mamba."""
    network = Network()
    network.config.model_type = model_type
    network.layers[0]["out_proj"] = nn.Linear(2, 2)
    assert find_targets(network, ["all-linear"]) == targets


def test_names_are_those_of_peft():
    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert is_adapter(name)
    assert adapter_name(name) == "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert not is_adapter("model.layers.0.self_attn.q_proj.base_layer.weight")
