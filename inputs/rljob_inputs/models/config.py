"""What config.json says about a model: whether it can be trained and served, and how long a text may be. Pure.

Follows vLLM and transformers: a limit that vLLM would refuse after a minute of loading is found here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Config = Mapping[str, Any]
HEAD_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Fields that make the logits differ from hidden @ weight.T, which the trainer computes."""
_NOT_CAUSAL = (
    "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice",
    "ForPreTraining", "ForImageClassification", "EncoderModel", "Model",
)  # fmt: skip
"""Ends of architectures without a head that predicts the next token."""
_CAUSAL = ("ForCausalLM", "LMHeadModel")
_LENGTHS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length", "max_target_positions",
    "max_sequence_length", "max_seq_length", "seq_len",
)  # fmt: skip
"""Names of the context length, as vLLM knows them."""
_UNSCALED_ROPE = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
"""Types of RoPE scaling whose factor is already part of the context length."""
_NO_FLOAT16 = ("gemma2", "gemma3", "gemma3_text", "glm4")
"""Model types that are numerically unstable in float16, which vLLM refuses."""
_ALLOWS_ANY_LENGTH = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
_OVERRIDES = ("--hf-overrides", "--hf_overrides", "--max-model-len", "--max_model_len")
"""Arguments of vLLM that change the length that config.json allows."""


def text_config(config: Config) -> Config:
    """Return the part about text: multimodal models nest it."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def find_context_length(config: Config) -> int | None:
    """Return the longest text that vLLM accepts, in tokens; None if config.json does not say."""
    text = text_config(config)
    known = [text[name] for name in _LENGTHS if isinstance(text.get(name), int) and text[name] > 0]
    if not known:
        return None
    if isinstance(model_max_length := text.get("model_max_length"), int) and model_max_length > 0:
        known = [model_max_length]
    factor = 1.0
    if "gemma3" not in str(text.get("model_type")):
        for rope in _rope_parameters(text):
            kind = rope.get("rope_type", rope.get("type", "default"))
            if kind not in _UNSCALED_ROPE:
                factor = rope.get("factor") or factor
    return int(min(known) * factor)


def overrides_length(extra_args: Iterable[str], env: Mapping[str, str]) -> bool:
    """Return whether arguments or env of vLLM make the context length of config.json meaningless."""
    return _ALLOWS_ANY_LENGTH in env or any(argument.startswith(_OVERRIDES) for argument in extra_args)


def _rope_parameters(text: Config) -> list[Config]:
    """Return them as one list: transformers 5 has them by type of layer, earlier releases call them rope_scaling."""
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    if not isinstance(rope, Mapping):
        return []
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    return nested or [rope]


def find_training_problems(config: Config) -> Iterator[str]:
    """Yield why the trainer cannot train the model."""
    architectures = [name for name in config.get("architectures") or [] if isinstance(name, str)]
    if config.get("is_encoder_decoder") or (architectures and all(map(_is_not_causal, architectures))):
        what = ", ".join(architectures) or config.get("model_type")
        yield f"is not a causal language model, but {what}; choose one whose architecture ends in ForCausalLM"
        return
    changed = [name for name in HEAD_TRANSFORMS if text_config(config).get(name) not in (None, 1, 1.0)]
    if changed:
        yield (
            f"changes its logits after the head ({', '.join(changed)}), which the trainer does not support; "
            "use a model with a plain head"
        )
    quantization = config.get("quantization_config")
    if isinstance(quantization, Mapping):
        method = quantization.get("quant_method", "unknown method")
        yield f"is quantized ({method}), which cannot be trained; use the model in bfloat16, float16 or float32"


def _is_not_causal(architecture: str) -> bool:
    return architecture.endswith(_NOT_CAUSAL) and not architecture.endswith(_CAUSAL)


def find_dtype_problem(config: Config, dtype: str) -> str:
    """Return why vLLM refuses the data type; empty if it does not."""
    model_type = str(config.get("model_type"))
    if dtype == "float16" and model_type in _NO_FLOAT16:
        return f"is float16, in which {model_type} is numerically unstable; set it to bfloat16"
    return ""


def find_length_problem(config: Config, max_model_len: int) -> str:
    """Return why vLLM refuses the limit; empty if it does not."""
    context = find_context_length(config)
    if context is None or max_model_len <= context:
        return ""
    return f"is {max_model_len}, but the model's context is {context} tokens (config.json); set it to {context} or less"
