"""When FSDP2 gathers parameters and reduces gradients, and which shards are in host memory, for the policy, the
reference model and a critic.

Invariant: between calls, gradients are sharded, and so is everything that the optimizer does not update.
"""

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rljob_inputs.memory.limits import ShardingMode as ShardingMode  # its home for the trainer
from rljob_inputs.memory.limits import choose_sharding


def build_mesh(device: torch.device) -> DeviceMesh:
    """Return the mesh of all ranks, over which parameters are sharded. A collective."""
    return init_device_mesh(device.type, (dist.get_world_size(),))


def gather(shard: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the whole parameter on the mesh's device. A collective, which needs NCCL alone: a shard in host memory is
    copied to the device first."""
    moved = cast(DTensor, shard.detach())
    return cast(DTensor, moved.to(device=moved.device_mesh.device_type, dtype=dtype or moved.dtype)).full_tensor()


def find_smallest_memory(device: torch.device) -> int | None:
    """Return the bytes of the smallest GPU of all ranks, which decides for all; None without GPUs. A collective."""
    if device.type != "cuda":
        return None
    total = torch.tensor(torch.cuda.get_device_properties(device).total_memory, device=device)
    dist.all_reduce(total, dist.ReduceOp.MIN)
    return int(total)


def choose_mode(num_parameters: int, num_frozen: int, dtype: torch.dtype, gpu_bytes: int | None) -> ShardingMode:
    """Return the fastest mode for which there is memory. `num_frozen`: parameters of the reference model. `gpu_bytes`:
    of the smallest GPU; None: on CPUs."""
    if gpu_bytes is None:
        return ShardingMode(keep_gathered=True, reduce_once=True)
    return choose_sharding(num_parameters, num_frozen, dtype.itemsize, gpu_bytes)


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
