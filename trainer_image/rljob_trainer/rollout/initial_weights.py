"""vLLM's load format `dummy` in a rollout: no checkpoint is read, because the first pull replaces every parameter.

vLLM's own loader for this format takes seconds to draw random numbers on CPUs, and it overwrites buffers, which no pull
replaces. Leaves the pull to the transfer engine. Invariant: what no pull replaces comes from the checkpoint, or changes
the digest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from vllm.logger import init_logger
from vllm.model_executor.model_loader import DefaultModelLoader, register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from rljob_trainer.rollout.own_weights import find_engine_reason

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

# Of vllm's hierarchy: vLLM configures no other logger in its workers.
logger = init_logger("vllm.rljob_trainer.rollout.initial_weights")

LOAD_FORMAT = "dummy"
"""vLLM knows the name: for other formats it also asks the checkpoint which tensors it has."""
PLACEHOLDER = 2.0**-10
"""Value of every parameter. Exact in every float type, and not 0, which would add nothing to the digest: a parameter
that the trainer does not publish would not be noticed."""


@register_model_loader(LOAD_FORMAT)
class InitialWeights(BaseModelLoader):
    """Fills the parameters with a placeholder; loads the checkpoint of a model for which the pull is not enough."""

    def download_model(self, model_config: ModelConfig) -> None:
        """Do nothing: where the checkpoint is needed, its loader downloads it."""

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
        if reason := find_engine_reason(vllm_config, model_config):
            return self._checkpoint(reason).load_model(vllm_config, model_config, prefix)
        return super().load_model(vllm_config, model_config, prefix)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        if buffers := list(find_checkpoint_buffers(model)):
            reason = f"no pull replaces its buffers ({', '.join(buffers[:3])})"
            self._checkpoint(reason).load_weights(model, model_config)
        else:
            fill(model)

    def _checkpoint(self, reason: str) -> DefaultModelLoader:
        logger.info("Loading the checkpoint: %s", reason)
        return DefaultModelLoader(replace(self.load_config, load_format="auto"))


def find_checkpoint_buffers(model: nn.Module) -> Iterator[str]:
    """Yield the names of buffers that a checkpoint may have. vLLM sets those that begin with an underscore itself: the
    scales of quantized keys and values."""
    for prefix, layer in model.named_modules():
        for name, buffer in layer.named_buffers(recurse=False):
            if name not in layer._non_persistent_buffers_set and not name.startswith("_") and buffer.numel():
                yield f"{prefix}.{name}"


@torch.no_grad()
def fill(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.fill_(getattr(parameter, "dummy_weight_value", PLACEHOLDER))
