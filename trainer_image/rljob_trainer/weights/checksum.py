"""A digest of a model's parameters that does not change with fusion: q, k and v digest like one qkv matrix.

Two sums modulo 2**64 over all elements: of their bit patterns, and of a non-linear mix of each pattern. Zero bits add
nothing, so padding does not count; nor do order, shape and names. Every change of a value is detected, except for
collisions (about 2**-64). A permutation of the values is not detected: the file's sha256 covers the transfer. Both
sides must hold the wire dtype, and a tied parameter counts once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

_MODULUS = 1 << 64
_MIX_FACTOR = 0x9E3779B97F4A7C15 - _MODULUS  # 2**64 / golden ratio, odd, as a signed 64-bit number
_MIX_SHIFT = 29
# Too small for torch to use threads: one core computes each block in its cache. On a busy machine, the barriers of
# thousands of tiny parallel regions took 20 s instead of 0.25 s. A GPU needs larger blocks.
_CPU_BLOCK_ELEMENTS = 32_000
_DEVICE_BLOCK_ELEMENTS = 1 << 24
_BITS_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Digest:
    """Digests of disjoint sets of parameters add up, so shards and layers can be digested separately."""

    plain: int = 0
    mixed: int = 0

    def __add__(self, other: Digest) -> Digest:
        return Digest((self.plain + other.plain) % _MODULUS, (self.mixed + other.mixed) % _MODULUS)

    def __str__(self) -> str:
        return f"{self.plain:016x}{self.mixed:016x}"

    @classmethod
    def parse(cls, text: str) -> Digest:
        return cls(int(text[:16], 16), int(text[16:], 16))


def digest_tensors(tensors: Iterable[Tensor]) -> Digest:
    """Return the digest of distinct parameters: tied ones count once."""
    return reduce(Digest.__add__, map(digest_tensor, distinct(tensors)), Digest())


def distinct(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield each tensor with memory once."""
    seen = set()
    for tensor in tensors:
        if tensor.numel() and not tensor.is_meta and (key := memory_key(tensor)) not in seen:
            seen.add(key)
            yield tensor


def memory_key(tensor: Tensor) -> tuple[int, int, torch.dtype, torch.device]:
    """Return a key that is equal for tensors that share their memory (tied parameters)."""
    return tensor.data_ptr(), tensor.numel(), tensor.dtype, tensor.device


@torch.no_grad()
def digest_tensor(tensor: Tensor) -> Digest:
    """Return the digest of one tensor. Works in blocks, so it needs memory for two blocks only."""
    bits = tensor.detach().contiguous().view(-1).view(_BITS_DTYPES[tensor.element_size()])
    block = _CPU_BLOCK_ELEMENTS if bits.device.type == "cpu" else _DEVICE_BLOCK_ELEMENTS
    values = torch.empty(min(block, bits.numel()), dtype=torch.int64, device=bits.device)
    mixes = torch.empty_like(values)
    sums = torch.zeros(2, dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), block):
        piece = bits[start : start + block]
        value, mix = values[: piece.numel()], mixes[: piece.numel()]
        value.copy_(piece)
        sums[0] += value.sum()
        value.mul_(_MIX_FACTOR)
        torch.bitwise_right_shift(value, _MIX_SHIFT, out=mix)
        sums[1] += mix.bitwise_xor_(value).sum()
    plain, mixed = sums.tolist()
    return Digest(plain % _MODULUS, mixed % _MODULUS)
