"""Writes one version of the weights: tensors, as they are gathered, into a mapped file.

    add(tensor) --> on GPUs: digest there, and copy to pinned memory in the background
                --> chunks that are complete --> threads: copy into the file, digest, hash, while they are in the cache

Holds no more than `_MAX_PENDING_CHUNKS` of the weights besides the file. Leaves names of versions and reuse of files to
the store.
"""

import ctypes
from collections import defaultdict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from rljob_api.wire.weights import DigestUnit
from rljob_trainer.weights.checksum import BITS_DTYPES, Digest, digest_on_device, digest_tensor
from rljob_trainer.weights.file_hash import CHUNK_BYTES, hash_chunk
from rljob_trainer.weights.mapped import Layout, MappedFile, TensorSpec

_MAX_PENDING_CHUNKS = 256


@dataclass
class _Part:
    """A part of a tensor, in one chunk of the file."""

    source: Tensor
    """The tensor on the host, contiguous."""
    begin: int
    """Start of the part in the tensor, in bytes."""
    num_bytes: int
    offset: int
    """In the file."""
    item_bytes: int
    is_digested: bool
    copied: torch.cuda.Event | None
    """The end of the copy to the host."""


class WeightWriter:
    """Fills one file. After finish(), the file has the layout and all tensors."""

    def __init__(self, file: MappedFile, layout: Layout, unit: DigestUnit, threads: ThreadPoolExecutor) -> None:
        self._file, self._layout, self._unit, self._threads = file, layout, unit, threads
        self._parts: dict[int, list[_Part]] = defaultdict(list)
        """By index of the chunk."""
        num_chunks = -(-layout.num_bytes // CHUNK_BYTES)
        self._missing = [min(CHUNK_BYTES, layout.num_bytes - i * CHUNK_BYTES) for i in range(num_chunks)]
        """Bytes, by index of the chunk."""
        self._hashes = [b""] * num_chunks
        self._pending: deque[Future[Digest]] = deque()
        self._digest = Digest()
        self._device_digests: list[Tensor] = []
        file.data[: len(layout.header)] = layout.header
        self._expect(0, len(layout.header), None)

    def add(self, name: str, tensor: Tensor) -> None:
        """Write a tensor. It may change again after finish()."""
        if TensorSpec.of(tensor) != self._layout.specs[name]:
            raise ValueError(f"{name}: {TensorSpec.of(tensor)}, announced as {self._layout.specs[name]}")
        if not tensor.numel():
            return
        tensor, copied = tensor.detach().contiguous(), None
        is_digested = tensor.device.type != "cpu"
        if is_digested:
            self._device_digests.append(digest_on_device(tensor, self._unit))
            tensor, copied = _copy_to_host(tensor)
        self._expect(self._layout.offsets[name], tensor.nbytes, tensor, is_digested=is_digested, copied=copied)

    def finish(self) -> tuple[bytes, Digest]:
        """Return the hashes of the file's chunks, and the digest of the parameters. Raise ValueError if a tensor is
        missing."""
        self._wait(0)
        if any(self._missing):
            raise ValueError("not all tensors of the layout were added")
        digest = sum(map(Digest.of_device, self._device_digests), start=self._digest)
        return b"".join(self._hashes), digest

    def _expect(
        self,
        offset: int,
        num_bytes: int,
        source: Tensor | None,
        *,
        is_digested: bool = True,
        copied: torch.cuda.Event | None = None,
    ) -> None:
        """Add what is in [offset, offset + num_bytes) of the file to its chunks. Without a source, the file has it."""
        begin = 0
        while begin < num_bytes:
            index = (offset + begin) // CHUNK_BYTES
            size = min((index + 1) * CHUNK_BYTES - offset - begin, num_bytes - begin)
            if source is not None:
                item_bytes = source.element_size() if self._unit == "element" else 8
                part = _Part(source, begin, size, offset + begin, item_bytes, is_digested, copied)
                self._parts[index].append(part)
            self._missing[index] -= size
            begin += size
            if not self._missing[index]:
                self._wait(_MAX_PENDING_CHUNKS)
                self._pending.append(self._threads.submit(self._write_chunk, index, self._parts.pop(index, [])))

    def _wait(self, num_pending: int) -> None:
        """Wait until at most this many chunks are not written."""
        while len(self._pending) > num_pending:
            self._digest += self._pending.popleft().result()

    def _write_chunk(self, index: int, parts: list[_Part]) -> Digest:
        """Return the digest of the parts that have none."""
        digest = Digest()
        for part in parts:
            if part.copied is not None:
                part.copied.synchronize()
            target = self._file.bytes[part.offset : part.offset + part.num_bytes]
            # Not copy_, which would start more threads.
            ctypes.memmove(target.data_ptr(), part.source.data_ptr() + part.begin, part.num_bytes)
            if not part.is_digested:
                digest += digest_tensor(target.view(BITS_DTYPES[part.item_bytes]), self._unit)
        chunk = self._file.data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
        self._hashes[index] = hash_chunk(chunk)
        return digest


def _copy_to_host(tensor: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    """Copy a GPU's tensor to pinned memory, in the background. Return the copy, and the event of its end."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return host, copied
