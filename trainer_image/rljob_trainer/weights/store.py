"""The publisher's side of weights: writes each version once as safetensors, and serves the file over HTTP.

Replicas on the same machine read the file in place. A file that can be requested is complete. The newest two are kept,
so that a rollout can finish downloading the previous version. An older one is written again (see weights.mapped),
unless a replica still reads it: then it is deleted, and lives until its reader closes it.
"""

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from rljob_api.errors import TransientError
from rljob_api.wire.contract import PORT_WEIGHTS
from rljob_api.wire.ports import listening_port
from rljob_api.wire.weights import DigestUnit, LocalFile, WeightManifest
from rljob_inputs.memory.limits import NUM_KEPT_VERSIONS
from rljob_trainer.weights.file_hash import hash_file
from rljob_trainer.weights.file_server import ServedFile, WeightServer
from rljob_trainer.weights.mapped import Layout, MappedFile, TensorSpec, boot_id
from rljob_trainer.weights.scratch import open_scratch_folder
from rljob_trainer.weights.writer import WeightWriter

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
        slot.rename(slot.path.with_name(f"{generation}-{version}.safetensors"))
        slot.file.unlock()
        with self._lock:
            published = [*self._published, slot]
            self._published, self._spare = published[-NUM_KEPT_VERSIONS:], None
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
            if found is not None:
                found.num_readers += 1
        if found is None:
            yield None
            return
        try:
            yield ServedFile(found.file.data, found.hashes)
        finally:
            with self._lock:
                found.num_readers -= 1
