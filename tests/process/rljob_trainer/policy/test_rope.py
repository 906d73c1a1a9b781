"""Frequencies of rotary embeddings are fixed as vLLM fixes them. Imports transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config

from rljob_api.errors import UserError
from rljob_trainer.policy.model_loading import open_network

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 101, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16,
    "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
ROWS = torch.arange(3, 43)[None]


def save(config: Any, folder: Path) -> str:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "layers" in name and parameter.dim() == 2:
                parameter *= 10  # scores that are not near 0
    network.save_pretrained(folder)
    return str(folder)


def open_whole(source: str, max_model_len: int | None) -> Any:
    opened = open_network(
        source, dtype=torch.float32, attention="auto", options={"revision": "main"}, max_model_len=max_model_len
    )
    network = opened.network
    from safetensors.torch import load_file

    network.load_state_dict(load_file(f"{source}/model.safetensors"), strict=False, assign=True)
    network.tie_weights()
    return network


@pytest.mark.parametrize(("max_model_len", "factor"), [(64, 4.0), (16, 1.0), (None, 1.0)])
def test_longrope_has_the_factors_of_max_model_len_for_rows_of_any_length(tmp_path, max_model_len, factor):
    config = Phi3Config(
        **SIZES, max_position_embeddings=64, original_max_position_embeddings=16, rope_parameters=LONGROPE
    )
    network = open_whole(save(config, tmp_path), max_model_len)
    rotary = network.model.rotary_emb
    expected = 1 / (factor * 1e4 ** (torch.arange(0, 16, 2) / 16))
    with torch.no_grad():
        whole = network(ROWS).logits[:, :10]  # 40 tokens: transformers would take the long factors
        assert torch.allclose(rotary.inv_freq, expected)
        assert torch.allclose(network(ROWS[:, :10]).logits, whole, atol=1e-5), "a row depends on its neighbours"
    assert network.config.rope_parameters["rope_type"] == "longrope", "the export has the model's own configuration"


def test_dynamic_rope_is_refused_beyond_the_length_to_which_vllm_computes_it(tmp_path):
    source = save(LlamaConfig(**SIZES, max_position_embeddings=16, rope_parameters=DYNAMIC), tmp_path)
    open_whole(source, 16)
    with pytest.raises(UserError, match=r"set spec.rollout.maxModelLen to 16 or less, got 64"):
        open_whole(source, 64)
