"""The publisher's side of weights: writes each version once as safetensors, and serves the file over HTTP.

    add(tensor) --> on GPUs: digest there, and copy to pinned memory in the background
                --> chunks that are complete --> threads: copy into the file, digest, hash, while they are in the cache

The writer holds no more than `_MAX_PENDING_CHUNKS` of the weights besides the file. Replicas on the same machine read
the file in place. A file that can be requested is complete. The newest two are kept, so that a rollout can finish
downloading the previous version. An older one is written again (see weights.mapped), unless a replica still reads it:
then it is deleted, and lives until its reader closes it.
"""

import contextlib
import ctypes
import os
import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from rljob_api.errors import TransientError
from rljob_api.wire.contract import PORT_WEIGHTS
from rljob_api.wire.discovery import listening_port
from rljob_api.wire.weights import DigestUnit, LocalFile, WeightManifest
from rljob_inputs.memory.limits import NUM_KEPT_VERSIONS
from rljob_trainer.weights.checksum import (
    BITS_DTYPES,
    CHUNK_BYTES,
    Digest,
    digest_on_device,
    digest_tensor,
    hash_chunk,
    hash_file,
)
from rljob_trainer.weights.file_server import ServedFile, WeightServer
from rljob_trainer.weights.mapped import Layout, MappedFile, TensorSpec, boot_id, open_scratch_folder

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


_MAX_THREADS = 8


class _Slot:
    """A file of the store, and how many responses read it."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.path = path
        self.file = MappedFile(path, num_bytes=num_bytes)
        self.file.lock(exclusive=True)
        self.num_readers = 0
        self.hashes = b""
        """Hashes of the chunks."""
        self.header = b""
        self.base: _Slot | None = None
        """The version before, while it is kept and has the same tensors."""
        self.deltas: dict[int, bytes] = {}
        """See `ServedFile`."""

    def rename(self, path: Path) -> None:
        self.path = self.path.replace(path)

    def delete(self) -> None:
        self.path.unlink(missing_ok=True)
        self.file.close()


class WeightStore:
    """A file server in a separate thread, from construction to close()."""

    def __init__(self, host: str, token: str) -> None:
        """Raise TransientError if the port is in use."""
        self._address = f"{host}:{listening_port(PORT_WEIGHTS)}"
        self._folder: Path | None = None
        # The other ranks of this machine wait meanwhile.
        num_threads = min(len(os.sched_getaffinity(0)), _MAX_THREADS)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="publish")
        self._num_files = 0
        self._lock = threading.Lock()
        """Guards what follows, and the slots' readers."""
        self._published: list[_Slot] = []
        self._spare: _Slot | None = None
        try:
            self._server = WeightServer(host, token, self._reading)
        except OSError as error:
            raise TransientError(f"cannot serve weights on {self._address}: {error}") from error

    def close(self) -> None:
        self._server.close()
        self._threads.shutdown()
        for slot in (*self._published, *([self._spare] if self._spare else [])):
            slot.delete()

    def publish_stream(
        self,
        specs: Mapping[str, TensorSpec],
        tensors: Iterable[tuple[str, Tensor]],
        generation: str,
        version: int,
        unit: DigestUnit,
    ) -> WeightManifest:
        """Write a version while its tensors are gathered, make it available, and return the manifest for the head to
        announce. `tensors`: exactly those of `specs`, in any order; tied ones once."""
        layout = Layout.of(specs)
        slot = self._spare = self._take(layout.num_bytes)
        writer = WeightWriter(slot.file, layout, unit, self._threads)
        for name, tensor in tensors:
            writer.add(name, tensor)
        slot.hashes, digest = writer.finish()
        slot.header, slot.deltas = layout.header, {}
        slot.rename(slot.path.with_name(f"{generation}-{version}.safetensors"))
        slot.file.unlock()
        with self._lock:
            last = self._published[-1] if self._published else None
            slot.base = last if last is not None and last.header == slot.header else None
            published = [*self._published, slot]
            self._published, self._spare = published[-NUM_KEPT_VERSIONS:], None
            for old in published[:-1]:  # the next version is written to the base of these
                old.base, old.deltas = None, {}
            for old in published[:-NUM_KEPT_VERSIONS]:
                self._spare = old
        device, inode = slot.file.identity
        return WeightManifest(
            generation=generation,
            version=version,
            url=f"http://{self._address}/weights/{slot.path.name}",
            num_bytes=layout.num_bytes,
            file_hash=hash_file(slot.hashes),
            checksum=str(digest),
            digest_unit=unit,
            local=LocalFile(boot_id=boot_id(), path=str(slot.path), device=device, inode=inode),
        )

    def _take(self, num_bytes: int) -> _Slot:
        """Return a file without readers: the one that is no longer kept, or a new one. Raise UserError without room."""
        with self._lock:
            old, self._spare = self._spare, None
            is_free = old is not None and not old.num_readers
        if self._folder is None:
            self._folder = open_scratch_folder((NUM_KEPT_VERSIONS + 1) * num_bytes)
        self._num_files += 1
        path = self._folder / f"{self._num_files}.partial"
        if old is not None:
            if is_free and len(old.file.data) == num_bytes and old.file.lock(exclusive=True):
                old.rename(path)
                return old
            old.delete()
        return _Slot(path, num_bytes)

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[ServedFile | None]:
        # Serve published files only: never join the URL to a folder.
        with self._lock:
            found = next((slot for slot in self._published if slot.path.name == name), None)
            base = found.base if found is not None else None
            slots = [slot for slot in (found, base) if slot is not None]
            for slot in slots:
                slot.num_readers += 1
        if found is None:
            yield None
            return
        served = ServedFile(found.file.data, found.hashes)
        if base is not None:
            served = replace(served, base=hash_file(base.hashes), base_data=base.file.data, deltas=found.deltas)
        try:
            yield served
        finally:
            with self._lock:
                for slot in slots:
                    slot.num_readers -= 1
