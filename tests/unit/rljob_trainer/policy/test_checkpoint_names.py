"""Names of experts and of renamed modules, against what transformers' save_pretrained writes."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rljob_trainer.policy.checkpoint_names import engine_parameters, persistent_buffers, to_checkpoint

SHAPE = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def _build(kind):
    torch.manual_seed(0)
    if kind == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=3, num_experts_per_tok=2))
    if kind == "qwen3_moe":
        config = Qwen3MoeConfig(**SHAPE, head_dim=8, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=8)
        return Qwen3MoeForCausalLM(config)
    if kind == "glm4_moe":
        experts = {"n_routed_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
        model = Glm4MoeForCausalLM(Glm4MoeConfig(**SHAPE, **experts, head_dim=8, first_k_dense_replace=1))
        model.model.layers[1].mlp.gate.e_score_correction_bias.fill_(0.5)
        return model
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True))


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "glm4_moe", "qwen2"])
def test_checkpoint_is_what_save_pretrained_writes(kind, tmp_path):
    model = _build(kind)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    found = to_checkpoint(model, parameters | persistent_buffers(model))
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], saved[name]) for name in saved)
    assert len({tensor.untyped_storage().data_ptr() for tensor in found.values()}) == len(found), "memory is shared"


def test_buffers_that_vllm_holds_as_buffers_are_not_published():
    model = _build("glm4_moe")
    model.model.layers[0].register_buffer("layer_scalar", torch.ones(1))  # as Gemma 4
    assert list(engine_parameters(model)) == ["model.layers.1.mlp.gate.e_score_correction_bias"]
