"""What config.json says about a model: how long a text may be, and in which data types it computes. Pure.

Follows vLLM and transformers: a limit that vLLM would refuse after a minute of loading is found here.

It also decides whether rollouts load LoRA adapters or merged weights, if spec.trainer.lora.publish is auto.

A model may multiply its logits after the head, and limit them softly. transformers gives these settings other names in
each family. Invariant: a model whose forward pass does anything else is refused by the table of architectures.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rljob_api.manifest.job import RLJobSpec
from rljob_inputs.models.architectures import find_architecture, rope_parameters, text_config

Config = Mapping[str, Any]
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
        for rope in rope_parameters(text):
            kind = rope.get("rope_type", rope.get("type", "default"))
            if kind not in _UNSCALED_ROPE:
                factor = rope.get("factor") or factor
    return int(min(known) * factor)


def overrides_length(extra_args: Iterable[str], env: Mapping[str, str]) -> bool:
    """Return whether arguments or env of vLLM make the context length of config.json meaningless."""
    return _ALLOWS_ANY_LENGTH in env or any(argument.startswith(_OVERRIDES) for argument in extra_args)


def find_dtype_problem(config: Config, dtype: str, *, on_cpus: bool) -> str:
    """Return why vLLM refuses the data type; empty if it does not. `on_cpus`: whether rollouts have no GPU."""
    model_type = str(config.get("model_type"))
    if dtype == "float16" and model_type in _NO_FLOAT16:
        return f"is float16, in which {model_type} is numerically unstable; set it to bfloat16"
    architecture = find_architecture(config)
    if on_cpus and architecture is not None and architecture.on_cpus == "bfloat16" != dtype:
        return f"is {dtype}, and vLLM computes {architecture.name} on CPUs in bfloat16 alone; set it to bfloat16"
    return ""


def find_device_problem(config: Config) -> str:
    """Return why rollouts of the model need a GPU; empty if they do not."""
    architecture = find_architecture(config)
    if architecture is None or architecture.on_cpus != "none":
        return ""
    return f"is 0, and on CPUs vLLM does not compute {architecture.name} as its authors do; give each rollout a GPU"


def find_length_problem(config: Config, max_model_len: int) -> str:
    """Return why vLLM refuses the limit; empty if it does not."""
    context = find_context_length(config)
    if context is None or max_model_len <= context:
        return ""
    return f"is {max_model_len}, but the model's context is {context} tokens (config.json); set it to {context} or less"


EXPORTED_ADAPTER = "adapter"
"""Folder of an export with what peft and vLLM load."""
MIN_MERGED_SHARE = 0.5
"""Below it, most of the adapters' update is rounded away in merged weights. SmolLM2-135M at a learning rate of 1e-5 in
bfloat16 has 0.055 after 12 updates."""


def publishes_adapter(spec: RLJobSpec, config: Config) -> bool:
    """Whether rollouts load adapters. `config`: config.json of the model."""
    lora = spec.trainer.lora
    if lora is None or not spec.trains:
        return False
    return not find_adapter_obstacle(spec, config) if lora.publish == "auto" else lora.publish == "adapter"


def find_adapter_obstacle(spec: RLJobSpec, config: Config) -> str:
    """Return why vLLM cannot add adapters to the model; empty if it can."""
    architecture = find_architecture(config)
    if architecture is None:
        return "vLLM may not be able to add adapters to a model that is not of the table"
    if architecture.adapters == "none":
        return f"vLLM cannot add adapters to {architecture.name}"
    if architecture.adapters == "gpu" and spec.rollout.gpus_per_replica == 0:
        return f"vLLM cannot add adapters to {architecture.name} on CPUs"
    return ""


_FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
"""Settings of Cohere, Falcon-H1 and Muse: the logits are multiplied by it."""
_DIVISOR = "logits_scaling"
"""Setting of Granite and MiniCPM3. HyperCLOVA X multiplies by the setting of the same name."""
_MULTIPLIES_BY_DIVISOR = ("hyperclovax",)
_LIMIT = "final_logit_softcapping"
"""Setting of Gemma."""


@dataclass(frozen=True)
class LogitTransform:
    """logits = limit x tanh(factor x (hidden @ weight.T) / limit); without a limit, factor x (hidden @ weight.T)."""

    factor: float = 1.0
    limit: float | None = None


def find_logit_transform(text_config: Mapping[str, Any]) -> LogitTransform:
    """`text_config`: the part of config.json about text."""

    def number(name: str) -> float | None:
        value = text_config.get(name)
        return float(value) if isinstance(value, int | float) and value else None

    factor = 1.0
    for name in _FACTORS:
        factor *= number(name) or 1.0
    divisor = number(_DIVISOR) or 1.0
    is_factor = text_config.get("model_type") in _MULTIPLIES_BY_DIVISOR
    return LogitTransform(factor * divisor if is_factor else factor / divisor, number(_LIMIT))
