"""Weights of an engine that no pull replaces: they come from files. Some, by its settings, which a sleep must keep; or
the whole model, in a job without a trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from rljob_api.wire.weights import OWN_WEIGHTS
from rljob_trainer.concurrency import wait_forever
from rljob_trainer.rollout.weight_transfer import Level

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

    from rljob_trainer.rollout.puller import ReplicaState
    from rljob_trainer.rollout.weight_transfer import EngineLoader


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


async def serve_own_weights(engine: EngineLoader, state: ReplicaState) -> NoReturn:
    """In place of the puller, where nothing trains: be ready once the engine is warm, with what it has loaded."""
    await engine.warm_up()
    state.record_change(is_warm=True, announced=OWN_WEIGHTS, serving=await engine.adopt(OWN_WEIGHTS))
    await wait_forever()  # as a puller, it ends with its server
