"""When FSDP2 gathers parameters and reduces gradients, for the policy, the reference model and a critic.

Invariant: between calls, gradients are sharded, and so is everything that the optimizer does not update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

_GATHERED_SHARE_OF_DEVICE_MEMORY = 0.25
"""Parameters up to this share of a GPU's memory stay gathered from the first forward to the last backward."""
_GRADIENT_SHARE_OF_DEVICE_MEMORY = 0.05
"""Gradients up to this share of a GPU's memory add up unsharded over the micro-batches of a call, and are reduced once.
Larger ones are reduced after every micro-batch."""
_GRADIENT_BYTES = 4


@dataclass(frozen=True)
class ShardingMode:
    keep_gathered: bool
    """Whether the parameters stay gathered between the passes of an update."""
    reduce_once: bool
    """Whether a call reduces its gradients once, after the last backward. Until then a rank holds all gradients."""


def choose_mode(num_parameters: int, num_frozen: int, dtype: torch.dtype, device: torch.device) -> ShardingMode:
    """Return the fastest mode for which there is memory. `num_frozen`: parameters of the reference model."""
    if device.type == "cpu":
        return ShardingMode(keep_gathered=True, reduce_once=True)
    total = torch.cuda.get_device_properties(device).total_memory
    gathered = (num_parameters + num_frozen) * dtype.itemsize
    return ShardingMode(
        keep_gathered=gathered <= _GATHERED_SHARE_OF_DEVICE_MEMORY * total,
        reduce_once=num_parameters * _GRADIENT_BYTES <= _GRADIENT_SHARE_OF_DEVICE_MEMORY * total,
    )


def expect_backward(model: nn.Module, mode: ShardingMode, *, is_last: bool) -> None:
    """Prepare the next backward pass. The call's last one leaves all gradients sharded."""
    module = cast(FSDPModule, model)
    module.set_requires_gradient_sync(is_last or not mode.reduce_once)
    module.set_is_last_backward(is_last)
    if mode.keep_gathered:
        module.set_reshard_after_backward(False)


def fill_gradients(model: nn.Module) -> None:
    """Give every parameter a gradient of zero if none has one, so that an update without rows is one of the optimizer
    like any other."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if all(parameter.grad is None for parameter in trained):
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)


def unshard(model: nn.Module) -> None:
    """Gather all parameters. FSDP2 needs a forward pass before the first time."""
    for module in _units(model):
        module.unshard()


def reshard(model: nn.Module) -> None:
    """Free what was gathered, so that parameters are the shards that the optimizer updates."""
    for module in _units(model):
        module.reshard()


def _units(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
