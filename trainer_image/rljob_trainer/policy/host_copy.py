"""A rank's state in the host's memory: a copy that is written while training changes the state, or all of it while
others use the device.

torch's own stagers copy device meshes too, or shards twice. Invariants: a copy has the bits of the state at `stage`,
until the next `stage`; `free` and `restore` change no bit of the state.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from rljob_trainer.policy.sharding import reshard


class HostBuffers:
    """Host memory for tensors, by a number that each has every time. It is kept: to get it takes longer than the copy,
    above all on GPUs, where it is pinned."""

    def __init__(self) -> None:
        self._buffers: dict[int, Tensor] = {}

    def copy(self, number: int, tensor: Tensor) -> Tensor:
        """Return a copy, which is complete after `wait`. A DTensor stays one, of the same mesh."""
        local = local_part(tensor)
        if number not in self._buffers:
            self._buffers[number] = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda)
        return with_local(tensor, self._buffers[number].copy_(local, non_blocking=True))

    def wait(self) -> None:
        if any(buffer.is_pinned() for buffer in self._buffers.values()):
            torch.accelerator.synchronize()


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def with_local(tensor: Tensor, local: Tensor) -> Tensor:
    """Return a tensor like `tensor` with another local part, wherever that is."""
    # Not from_local(), which would move it to the mesh's device.
    return DTensor(local, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else local


class HostCopy(AsyncStager):
    """Copies the state of each checkpoint to the same memory."""

    _synchronize_after_execute = False

    def __init__(self) -> None:
        self._buffers = HostBuffers()
        """By the number of the leaf in the state, whose structure never changes."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        leaves, structure = tree_flatten(state_dict)
        copies = [self._buffers.copy(i, leaf) if isinstance(leaf, Tensor) else leaf for i, leaf in enumerate(leaves)]
        self._buffers.wait()
        return tree_unflatten(copies, structure)

    def synchronize_staging(self) -> None:
        """Nothing: `stage` returns complete copies."""

    def close(self) -> None:
        """Nothing: the copies last as long as the rank."""


@dataclass
class DeviceState:
    """Moves weights and optimizer state, without gradients, to host memory and back. Both methods do nothing the second
    time.

    Afterwards all is as under FSDP2's CPUOffloadPolicy: a parameter is a DTensor of the device's mesh, with its shard
    in host memory. Buffers stay, as there: they have kilobytes. FSDP2 keeps a second reference to each shard for its
    all-gather, with padding (FSDPParam._sharded_param_data). nn.Module._apply, which FSDPModule overrides, is its own
    way to replace shards: it changes the content of a parameter, not its identity, and renews that reference
    (FSDPParam.reset_sharded_param). On CPUs there is no other memory: only what is gathered and freed goes back."""

    device: torch.device
    models: Sequence[nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    _buffers: HostBuffers = field(default_factory=HostBuffers)
    _moved: set[int] = field(default_factory=set)
    """Numbers of the tensors that `free` moved. The others are in host memory all the time (trainer.offload)."""
    is_free: bool = False

    def free(self) -> None:
        if self.is_free:
            return
        for model in self.models:
            reshard(model)
        held = self._list_tensors()
        self._moved = {i for i, tensor in enumerate(held) if self._is_on_device(tensor)}
        self._replace(held, self._buffers.copy)
        self.is_free = True

    def restore(self) -> None:
        if not self.is_free:
            return
        self._replace(
            self._list_tensors(),
            lambda _, tensor: with_local(tensor, local_part(tensor).to(self.device, non_blocking=True, copy=True)),
        )
        self.is_free = False

    @staticmethod
    def _is_on_device(tensor: Tensor) -> bool:
        return local_part(tensor).device.type != "cpu"

    def _list_tensors(self) -> list[Tensor]:
        """Return all tensors, in the same order each time: tied parameters once, then the optimizers' state."""
        parameters = dict.fromkeys(parameter for model in self.models for parameter in model.parameters())
        states = (state for optimizer in self.optimizers for state in optimizer.state.values())
        return [*parameters, *(value for state in states for value in state.values() if isinstance(value, Tensor))]

    def _replace(self, held: Sequence[Tensor], move: Callable[[int, Tensor], Tensor]) -> None:
        """Replace the moved tensors by what `move` returns for their numbers."""
        if not self._moved:
            return
        new = {id(tensor): move(i, tensor) for i, tensor in enumerate(held) if i in self._moved}
        # Before FSDP2 copies a shard that needs padding, and before the source of a copy is used again.
        torch.get_device_module(self.device).synchronize()
        for model in self.models:
            model._apply(lambda tensor: new.pop(id(tensor), tensor))  # once: tied parameters are visited twice
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                state.update({name: new.pop(id(value), value) for name, value in state.items()})
