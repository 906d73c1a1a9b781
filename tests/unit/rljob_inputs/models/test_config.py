"""What config.json says, compared with what vLLM and transformers do."""

import pytest

from rljob_inputs.models.config import (
    find_context_length,
    find_device_problem,
    find_dtype_problem,
    find_length_problem,
)


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({}, None),
        ({"max_position_embeddings": 1024}, 1024),
        ({"n_positions": 512}, 512),
        ({"max_position_embeddings": 2048, "seq_length": 1024}, 1024),
        ({"max_position_embeddings": 8192, "model_max_length": 131072}, 131072),
        ({"text_config": {"max_position_embeddings": 77}, "max_position_embeddings": 5}, 77),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "linear", "factor": 4.0}}, 8192),
        ({"max_position_embeddings": 2048, "rope_parameters": {"rope_type": "dynamic", "factor": 2}}, 4096),
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 131072),
        ({"max_position_embeddings": 32768, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 32768),
        ({"max_position_embeddings": 100, "rope_parameters": {"full_attention": {"rope_type": "default"}}}, 100),
        ({"max_position_embeddings": 100, "model_type": "gemma3_text", "rope_scaling": {"factor": 8}}, 100),
    ],
)
def test_context_length_is_what_vllm_derives(config, length):
    assert find_context_length(config) == length


def test_limits_above_the_context_and_unstable_types_are_named():
    config = {"max_position_embeddings": 1024, "model_type": "gemma2"}
    assert find_length_problem(config, 4096) == (
        "is 4096, but the model's context is 1024 tokens (config.json); set it to 1024 or less"
    )
    assert not find_length_problem(config, 1024)
    assert "numerically unstable; set it to bfloat16" in find_dtype_problem(config, "float16", on_cpus=False)
    assert not find_dtype_problem(config, "bfloat16", on_cpus=True)


def test_what_vllm_does_not_compute_on_cpus_is_named():
    qwen, ernie = ({"architectures": [name]} for name in ("Qwen3_5ForConditionalGeneration", "Ernie4_5_MoeForCausalLM"))
    message = "is float32, and vLLM computes Qwen3_5ForConditionalGeneration on CPUs in bfloat16 alone"
    assert message in find_dtype_problem(qwen, "float32", on_cpus=True)
    assert not find_dtype_problem(qwen, "bfloat16", on_cpus=True)
    assert not find_dtype_problem(qwen, "float32", on_cpus=False)
    assert "give each rollout a GPU" in find_device_problem(ernie)
    assert not find_device_problem(qwen)
