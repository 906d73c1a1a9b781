"""A rank's copy of its state in the host's memory, which is written while training changes the state. And how much host
memory a pinned tensor takes.

torch's own stagers copy device meshes too, or shards twice. Invariant: a copy has the bits of the state at `stage`,
until the next `stage`.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def pin_exact_sizes() -> None:
    """Have torch pin as much memory as a tensor needs, where it rounds to the next power of two by default. Call it
    before torch uses a GPU. Has no effect if the user configures torch's allocator."""
    if not any(name in os.environ for name in _ALLOCATOR_VARIABLES):
        os.environ[_ALLOCATOR_VARIABLES[0]] = "pinned_max_round_threshold_mb:1"


class HostCopy(AsyncStager):
    """The memory is kept from one checkpoint to the next: to get it takes longer than the copy, above all on GPUs,
    where it is pinned."""

    _synchronize_after_execute = False

    def __init__(self) -> None:
        self._buffers: dict[int, Tensor] = {}
        """By the number of the leaf in the state, whose structure never changes."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        leaves, structure = tree_flatten(state_dict)
        copies = [self._copy(i, leaf) if isinstance(leaf, Tensor) else leaf for i, leaf in enumerate(leaves)]
        if any(buffer.is_pinned() for buffer in self._buffers.values()):
            torch.accelerator.synchronize()
        return tree_unflatten(copies, structure)

    def synchronize_staging(self) -> None:
        """Nothing: `stage` returns complete copies."""

    def close(self) -> None:
        """Nothing: the copies last as long as the rank."""

    def _copy(self, number: int, leaf: Tensor) -> Tensor:
        local = (leaf.to_local() if isinstance(leaf, DTensor) else leaf).detach()
        if number not in self._buffers:
            self._buffers[number] = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda)
        copy = self._buffers[number].copy_(local, non_blocking=True)
        # Not from_local(), which would move the copy to the mesh's device.
        return DTensor(copy, leaf._spec, requires_grad=False) if isinstance(leaf, DTensor) else copy
