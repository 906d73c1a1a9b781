"""A digest of a model's parameters that does not change with fusion: q, k and v digest like one qkv matrix.

It combines functions of the bit patterns of all units that do not depend on their order. So neither order, shape and
names count, nor zero bits, such as padding. A permutation of the units is not detected: the file's hash covers the
transfer. Both sides must use the same unit, and a tied parameter counts once.

element   the sum, and the sum of a non-linear mix of each pattern, modulo 2**64. Every other change of values is
          detected, except for collisions (about 2**-64). A bf16 value counts as the same value in fp32, which engines
          hold for the routers of some models; otherwise both sides must hold the wire dtype
word      8 bytes along the innermost dimension: the sum modulo 2**64, and the exclusive or. Both read memory at its
          speed, without a conversion. A different version, slice or dtype is detected like above; of flipped bits,
          a single one always, and most of several. Matrices may not be transposed, converted, nor cut within a word

See `choose_unit`.

The hash of a weight file is for integrity alone: it detects errors of transfers, not tampering. It is the XXH3 of the
hashes of the file's chunks. Several threads can hash chunks, in any order, while they are in a cache; and a
receiver that has the hashes can verify a part of the file.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, reduce
from typing import Protocol

import numpy as np
import torch
import xxhash
from torch import Tensor

from rljob_api.wire.weights import DigestUnit

CHUNK_BYTES = 1 << 20
"""All chunks of a weight file but the last have this size."""
HASH_BYTES = 16
"""Size of a chunk's hash."""
_MODULUS = 1 << 64
_MIX_FACTOR = 0x9E3779B97F4A7C15 - _MODULUS  # 2**64 / golden ratio, odd, as a signed 64-bit number
_MIX_SHIFT = 29
_BF16_SHIFT = 16
"""Turns the bits of a bf16 value into those of the same value in fp32."""
_WORD_BYTES = 8
# Too small for torch to use threads: one core computes each block in its cache. On a busy machine, the barriers of
# thousands of tiny parallel regions took 20 s instead of 0.25 s. A GPU needs larger blocks.
_CPU_BLOCK_ELEMENTS = 32_000
_DEVICE_BLOCK_ELEMENTS = 1 << 24
_BLOCK_WORDS = CHUNK_BYTES // _WORD_BYTES
"""A chunk of a weight file, which a core has in its cache when it digests it."""
_PIECE_UNITS = 1 << 19
"""Piece of a tensor, for one thread."""
BITS_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MIN_SHARDS = 8
"""Tensor-parallel sizes that divide it may be set in rollout.extraArgs, too."""


@dataclass(frozen=True)
class Digest:
    """Digests of disjoint sets of parameters add up, so shards and layers can be digested separately."""

    plain: int = 0
    mixed: int = 0
    """Sum of elements."""
    parity: int = 0
    """Parity of words."""

    def __add__(self, other: Digest) -> Digest:
        return Digest(
            (self.plain + other.plain) % _MODULUS, (self.mixed + other.mixed) % _MODULUS, self.parity ^ other.parity
        )

    def __str__(self) -> str:
        return f"{self.plain:016x}{self.mixed:016x}{self.parity:016x}"

    @classmethod
    def parse(cls, text: str) -> Digest:
        return cls(int(text[:16], 16), int(text[16:32], 16), int(text[32:], 16))

    @classmethod
    def of_device(cls, values: Tensor) -> Digest:
        """`values`: of `digest_on_device` [3]. Waits for the device."""
        plain, mixed, parity = (value % _MODULUS for value in values.tolist())
        return cls(plain, mixed, parity)


class Spec(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...


def choose_unit(specs: Iterable[Spec], num_shards: int) -> DigestUnit:
    """Return the largest unit for parameters of these shapes and dtypes, loaded by engines of `num_shards`
    tensor-parallel workers, which cut matrices along one of their dimensions, and vectors.

    Experts and convolutions have three dimensions, which engines transpose at will.
    """
    multiple = _WORD_BYTES * math.lcm(num_shards, _MIN_SHARDS)
    fits = all(0 < len(s.shape) <= 2 and s.shape[-1] * s.dtype.itemsize % multiple == 0 for s in specs)
    return "word" if fits else "element"


def digest_tensors(tensors: Iterable[Tensor], unit: DigestUnit = "element") -> Digest:
    """Return the digest of distinct parameters: tied ones count once. On CPUs, with as many threads as torch uses."""
    pieces = [piece for tensor in distinct(tensors) for piece in _split(_bits(tensor, unit))]
    num_threads = torch.get_num_threads()
    units = [unit] * len(pieces)
    if num_threads == 1 or len(pieces) == 1:
        return reduce(operator.add, map(_digest_bits, pieces, units), Digest())
    return reduce(operator.add, _threads(num_threads).map(_digest_bits, pieces, units), Digest())


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


def digest_tensor(tensor: Tensor, unit: DigestUnit = "element") -> Digest:
    """Return the digest of one tensor, in this thread. Needs memory for a few blocks only."""
    return _digest_bits(_bits(tensor, unit), unit)


def digest_on_device(tensor: Tensor, unit: DigestUnit) -> Tensor:
    """Return the values of a tensor's digest [3], without waiting for the device."""
    return _sum_on_device(_bits(tensor, unit), unit)


def _bits(tensor: Tensor, unit: DigestUnit) -> Tensor:
    """Return the units as integers [units]."""
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.int64 if unit == "word" else BITS_DTYPES[tensor.element_size()])


def _split(bits: Tensor) -> Iterable[Tensor]:
    return bits.split(_PIECE_UNITS) if bits.device.type == "cpu" else (bits,)


def _digest_bits(bits: Tensor, unit: DigestUnit) -> Digest:
    if unit == "element" or bits.device.type != "cpu":
        return Digest.of_device(_sum_on_device(bits, unit))
    units, total, parity = bits.numpy(), 0, 0  # numpy starts no threads
    for start in range(0, len(units), _BLOCK_WORDS):
        block = units[start : start + _BLOCK_WORDS]
        total += int(np.add.reduce(block))
        parity ^= int(np.bitwise_xor.reduce(block))
    return Digest(total % _MODULUS, parity=parity % _MODULUS)


@torch.no_grad()
def _sum_on_device(bits: Tensor, unit: DigestUnit) -> Tensor:
    zero = torch.zeros((), dtype=torch.int64, device=bits.device)
    if unit == "word":
        return torch.stack([bits.sum(), zero, _fold(bits)])
    shift = _BF16_SHIFT if bits.element_size() == 2 else 0
    factor = (_MIX_FACTOR << shift) % _MODULUS
    factor -= _MODULUS * (factor >= _MODULUS // 2)  # a signed 64-bit number
    block = _CPU_BLOCK_ELEMENTS if bits.device.type == "cpu" else _DEVICE_BLOCK_ELEMENTS
    values = torch.empty(min(block, bits.numel()), dtype=torch.int64, device=bits.device)
    mixes = torch.empty_like(values)
    plain, mixed = [zero], [zero]
    for piece in bits.split(block):
        value = values[: piece.numel()].copy_(piece)
        plain.append(value.sum())
        mix = torch.bitwise_right_shift(value.mul_(factor), _MIX_SHIFT, out=mixes[: piece.numel()])
        mixed.append(mix.bitwise_xor_(value).sum())
    return torch.stack([torch.stack(plain).sum() << shift, torch.stack(mixed).sum(), zero])


def _fold(units: Tensor) -> Tensor:
    """Return the exclusive or of all units. Torch has no such reduction."""
    last = torch.zeros((), dtype=torch.int64, device=units.device)
    while num_units := units.numel():
        if num_units % 2:
            last, units = last ^ units[-1], units[:-1]
        units = units[: num_units // 2] ^ units[num_units // 2 : num_units // 2 * 2]
    return last


@cache
def _threads(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="weights")


def hash_chunk(data: memoryview) -> bytes:
    return xxhash.xxh3_128(data).digest()


def hash_file(hashes: bytes) -> str:
    """`hashes`: of all chunks, in the order of the file."""
    return xxhash.xxh3_128(hashes).hexdigest()
