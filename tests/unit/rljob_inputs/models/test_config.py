"""What config.json says, compared with what vLLM and transformers do."""

import pytest

from rljob_inputs.models.config import (
    find_context_length,
    find_dtype_problem,
    find_length_problem,
    find_training_problems,
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


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["BertForMaskedLM"]}, "not a causal language model, but BertForMaskedLM"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "not a causal language model"),
        ({"architectures": ["Qwen3Model"]}, "not a causal language model"),
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "not a causal language model"),
        ({"architectures": ["Gemma2ForCausalLM"], "final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "awq"}}, "quantized (awq)"),
    ],
)
def test_models_that_cannot_be_trained_are_named(config, message):
    (problem,) = find_training_problems(config)
    assert message in problem


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"architectures": ["Qwen3ForCausalLM"], "logit_scale": 1.0},
        {"architectures": ["GPT2LMHeadModel"]},
        {"architectures": ["Gemma3ForConditionalGeneration"]},
    ],
)
def test_models_that_may_be_trained_pass(config):
    assert not list(find_training_problems(config))


def test_limits_above_the_context_and_unstable_types_are_named():
    config = {"max_position_embeddings": 1024, "model_type": "gemma2"}
    assert find_length_problem(config, 4096) == (
        "is 4096, but the model's context is 1024 tokens (config.json); set it to 1024 or less"
    )
    assert not find_length_problem(config, 1024)
    assert "numerically unstable; set it to bfloat16" in find_dtype_problem(config, "float16")
    assert not find_dtype_problem(config, "bfloat16")
