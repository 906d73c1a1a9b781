"""Weights of an engine that no pull replaces, by its settings: they come from files, and a sleep must keep them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rljob_trainer.rollout.weight_transfer import Level

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


def find_engine_reason(vllm_config: VllmConfig, model_config: ModelConfig) -> str:
    """Return why the engine's settings need the checkpoint; empty if they do not."""
    if model_config.quantization is not None:
        return "a quantized model has values that no pull replaces"
    if vllm_config.speculative_config is not None:
        return "no pull replaces the draft model"
    return ""


def choose_level(config: VllmConfig) -> Level:
    """Return how deep the engine sleeps: weights are dropped if a pull replaces all."""
    return 1 if config.lora_config is not None or find_engine_reason(config, config.model_config) else 2
