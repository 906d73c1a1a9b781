"""FSDP2's collectives through shared memory, for CPU ranks of one machine. gloo sends all bytes through sockets.

    copy a piece into this rank's slot --> barrier --> read the pieces of the others

Each rank has two slots and alternates. Invariant: a rank that enters the barrier of a piece has read the piece before
it, so one barrier per piece is enough. All ranks call the same collectives in the same order.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from rljob_trainer.temporary import create_file

log = logging.getLogger(__name__)

_FOLDER = Path("/dev/shm")
_SLOT_BYTES = 4 << 20
"""Small enough for the caches, and large enough that barriers do not count."""


def use_shared_memory(model: nn.Module, mesh: DeviceMesh) -> bool:
    """Let the FSDP2 units of `model` exchange parameters and gradients through shared memory. Return whether they do:
    on GPUs, or if a rank does not see the memory of another one, everything stays as it is. A collective."""
    group = mesh.get_group()
    if mesh.device_type != "cpu" or group.size() == 1 or dist.get_backend(group) != "gloo":
        return False
    slots = Slots.open(group)
    if slots is None:
        log.info("ranks exchange parameters and gradients by gloo: not all see one %s, or it lacks room", _FOLDER)
        return False
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(cast(Any, SharedAllGather(slots)))
            module.set_custom_reduce_scatter(cast(Any, SharedReduceScatter(slots)))
    return True


class Slots:
    """Memory that all ranks of a group see."""

    def __init__(self, group: dist.ProcessGroup, memory: Tensor) -> None:
        """`memory`: bytes [2, ranks, bytes of a slot]."""
        self.rank, self.num_ranks, self.num_bytes = group.rank(), group.size(), memory.shape[2]
        self._group, self._memory, self._turn = group, memory, 0

    @classmethod
    def open(cls, group: dist.ProcessGroup, num_bytes: int = _SLOT_BYTES) -> Slots | None:
        """Return slots of so many bytes; None if the ranks do not share memory, or there is no room. A collective."""
        shape = (2, group.size(), num_bytes)
        path, descriptor = _create(2 * group.size() * num_bytes) if group.rank() == 0 else (None, None)
        announced = [path]
        dist.broadcast_object_list(announced, group=group, group_src=0)
        path = announced[0]
        is_visible = torch.tensor(int(path is not None and _sees(path)))
        dist.all_reduce(is_visible, dist.ReduceOp.MIN, group=group)
        memory = None
        if is_visible:
            memory = torch.from_file(str(path), shared=True, size=2 * group.size() * num_bytes, dtype=torch.uint8)
        dist.barrier(group)  # all have mapped it
        if path is not None and descriptor is not None:
            path.unlink()
            os.close(descriptor)
        return None if memory is None else cls(group, memory.view(shape))

    def next(self) -> Tensor:
        """Return the slots of all ranks for the next piece, to write this rank's: [ranks, bytes]."""
        self._turn = 1 - self._turn
        return self._memory[self._turn]

    def wait(self) -> None:
        """Wait until all ranks have written their slots."""
        dist.barrier(self._group)


class _Collective:
    def __init__(self, slots: Slots) -> None:
        self._slots = slots

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class SharedAllGather(_Collective):
    """FSDP2's AllGather."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Write the inputs [values] of all ranks to the output [ranks * values], which may contain this one's."""
        slots, own = self._slots, input_tensor.view(torch.uint8)
        gathered = output_tensor.view(torch.uint8).view(slots.num_ranks, -1)
        if gathered[slots.rank].data_ptr() != own.data_ptr():
            gathered[slots.rank] = own
        for start in range(0, own.numel(), slots.num_bytes):
            piece = own[start : start + slots.num_bytes]
            end, shared = start + piece.numel(), slots.next()[:, : piece.numel()]
            shared[slots.rank] = piece
            slots.wait()
            for rank in _others(slots):
                gathered[rank, start:end] = shared[rank]


class SharedReduceScatter(_Collective):
    """FSDP2's ReduceScatter, for sums."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Write this rank's part of the sum of all inputs [ranks * values] to the output [values]."""
        assert op == dist.ReduceOp.SUM
        slots, parts = self._slots, input_tensor.view(self._slots.num_ranks, -1)
        size = slots.num_bytes // input_tensor.element_size() // slots.num_ranks
        for start in range(0, parts.shape[1], size):
            end = min(start + size, parts.shape[1])
            used = slots.num_ranks * (end - start) * input_tensor.element_size()
            shared = slots.next()[:, :used].view(input_tensor.dtype).view(slots.num_ranks, slots.num_ranks, -1)
            for rank in _others(slots):
                shared[slots.rank, rank] = parts[rank, start:end]
            slots.wait()
            total = output_tensor[start:end].copy_(parts[slots.rank, start:end])
            for rank in _others(slots):
                total += shared[rank, slots.rank]


def _others(slots: Slots) -> list[int]:
    return [rank for rank in range(slots.num_ranks) if rank != slots.rank]


def _sees(path: Path) -> bool:
    """Whether this rank shares the file's memory: its random name is of no other machine or Pod."""
    return path.exists()


def _create(num_bytes: int) -> tuple[Path, int] | tuple[None, None]:
    """Return a new file of reserved memory and its descriptor, or None if there is no room."""
    try:
        path, descriptor = create_file("ranks", _FOLDER)
    except OSError:
        return None, None
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError:
        path.unlink()
        os.close(descriptor)
        return None, None
    return path, descriptor
