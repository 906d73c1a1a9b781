"""Whether rollouts load LoRA adapters or merged weights: spec.trainer.lora.publish, and what auto means. Pure."""

from rljob_api.manifest.job import RLJobSpec
from rljob_inputs.models.architectures import find_architecture
from rljob_inputs.models.config import Config

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
