"""The shape of a model by its config.json. tests/integration/test_memory_plan.py compares counts with transformers."""

import pytest
from memory_plan.cases import QWEN25_1B5, QWEN25_7B, QWEN25_32B, SMOLLM2_135M

from rljob_inputs.memory.shapes import read_shape


@pytest.mark.parametrize(
    ("config", "count"),
    [  # of the published checkpoints
        (SMOLLM2_135M, 134_515_008),
        (QWEN25_1B5, 1_543_714_304),
        (QWEN25_7B, 7_615_616_512),
        (QWEN25_32B, 32_763_876_352),
    ],
)
def test_parameters_are_counted_exactly(config, count):
    assert read_shape(config).num_parameters == count


def test_a_mixture_of_experts_counts_all_experts_and_activates_some():
    qwen3 = {  # Qwen3-30B-A3B
        "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936, "tie_word_embeddings": False,
    }  # fmt: skip
    shape = read_shape(qwen3)
    assert shape.num_parameters == 30_532_122_624
    assert (shape.intermediate, shape.experts_per_token) == (768, 8)


def test_sizes_of_text_are_read_from_a_nested_configuration():
    assert read_shape({"model_type": "x", "text_config": QWEN25_1B5}).hidden == 1536


def test_a_configuration_without_sizes_has_no_shape():
    assert read_shape({"model_type": "mamba", "vocab_size": 100}) is None


@pytest.mark.parametrize(("model_type", "count"), [("gpt_neox", 10**9), ("qwen2", 1_543_714_304)])
def test_headers_count_the_parameters_of_unknown_architectures(model_type, count):
    shape = read_shape(QWEN25_1B5 | {"model_type": model_type}, known_parameters=10**9)
    assert shape.num_parameters == pytest.approx(count, rel=1e-6)


def test_adapters_of_all_linear_modules_and_of_some():
    shape = read_shape(QWEN25_7B)
    assert shape.adapter_parameters(32, []) == 80_740_352
    assert shape.adapter_parameters(32, ["q_proj", "v_proj"]) == 28 * 32 * (2 * 3584 + 3584 + 512)
