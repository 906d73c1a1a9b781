"""A rank's copy of its state in the host's memory, which is written while training changes the state.

torch's own stagers copy device meshes too, or shards twice. Invariant: a copy has the bits of the state at `stage`,
until the next `stage`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten


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
