"""Tensors as a sequence of buckets of fixed size, and back. Pure but for the copies.

A tensor may be larger than a bucket, and a bucket may have many tensors. So both sides need one bucket besides the
tensor that they are at.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_ALIGNMENT_BYTES = 256
"""Parts in a bucket begin at multiples, so that copies on a device are fast."""


class Part(NamedTuple):
    """A part of a tensor, in a bucket."""

    name: str
    dtype: str
    """Its name in torch."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    begin: int
    """Start in the tensor, in bytes."""
    num_bytes: int
    offset: int
    """In the bucket."""


def pack(tensors: Iterable[tuple[str, Tensor]], buckets: Sequence[Tensor]) -> Iterator[tuple[int, list[Part]]]:
    """Copy the tensors to the buckets in turn. Yield the number of one that is full, with its parts, and last of one
    that may not be. The bucket after it is written once the caller asks for the next one.

    `buckets`: [bytes] uint8, of equal size, on the tensors' device."""
    number, used, parts = 0, 0, list[Part]()
    for name, tensor in tensors:
        source, begin = _as_bytes(tensor), 0
        while True:
            size = min(len(source) - begin, len(buckets[number]) - used)
            buckets[number][used : used + size].copy_(source[begin : begin + size])
            parts.append(Part(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), begin, size, used))
            begin, used = begin + size, -(-(used + size) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            if used >= len(buckets[number]):
                yield number, parts
                number, used, parts = (number + 1) % len(buckets), 0, []
            if begin == len(source):
                break
    if parts:
        yield number, parts


class Assembly:
    """The tensors of a sequence of buckets, in memory of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: tuple[str, Tensor, Tensor] | None = None
        """Name, tensor, and its bytes, of the one whose parts have not all come."""

    def add(self, part: Part, bucket: Tensor) -> tuple[str, Tensor] | None:
        """Copy a part. Return the tensor if it was the last one. ValueError if it does not follow the one before."""
        if part.begin == 0 and self._open is None:
            tensor = torch.empty(part.shape, dtype=getattr(torch, part.dtype), device=self._device)
            self._open = part.name, tensor, _as_bytes(tensor)
        if self._open is None or self._open[0] != part.name:
            raise ValueError(f"a part of {part.name} comes out of order")
        name, tensor, memory = self._open
        end = part.begin + part.num_bytes
        memory[part.begin : end].copy_(bucket[part.offset : part.offset + part.num_bytes])
        if end < len(memory):
            return None
        self._open = None
        return name, tensor

    @property
    def is_complete(self) -> bool:
        return self._open is None


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return the content [bytes]."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
