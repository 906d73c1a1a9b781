"""Weight files in memory: the layout of safetensors, and files that stay mapped while they are written again and again.

The first touch of a page costs more than all the rest of an update, so neither writers nor readers give pages back.
Invariant: who reads a file holds a shared lock (flock), so that its owner does not write the next version to it.

Between the trainer and the engines, weight files are stored in memory if they fit, else on disk.
"""

from __future__ import annotations

import fcntl
import json
import math
import mmap
import os
import shutil
import tempfile
import warnings
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from rljob_api.errors import UserError
from rljob_trainer.temporary import TemporaryFolder

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_LENGTH_BYTES = 8
_ALIGNMENT_BYTES = 8
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def boot_id() -> str:
    """Return what identifies the running kernel, so its files and locks, too."""
    return _BOOT_ID.read_text().strip()


@dataclass(frozen=True)
class TensorSpec:
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """Where a safetensors file has which tensor."""

    header: bytes
    offsets: Mapping[str, int]
    """Offsets of each tensor, from the start of the file."""
    specs: Mapping[str, TensorSpec]

    @classmethod
    def of(cls, specs: Mapping[str, TensorSpec]) -> Layout:
        # Descending item sizes align all tensors.
        names = sorted(specs, key=lambda name: -specs[name].dtype.itemsize)
        relative, end, entries = {}, 0, {}
        for name in names:
            spec = specs[name]
            relative[name], end = end, end + spec.num_bytes
            offsets = [relative[name], end]
            entries[name] = {
                "dtype": _DTYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets
            }  # fmt: skip
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT_BYTES)
        header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
        return cls(header, {name: len(header) + relative[name] for name in names}, dict(specs))

    @classmethod
    def read(cls, data: memoryview) -> Layout:
        """Read the layout from a file's content."""
        start = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
        header = bytes(data[:start])
        entries = json.loads(header[_LENGTH_BYTES:])
        entries.pop("__metadata__", None)
        specs = {name: TensorSpec(tuple(e["shape"]), _DTYPES[e["dtype"]]) for name, e in entries.items()}
        return cls(header, {name: start + e["data_offsets"][0] for name, e in entries.items()}, specs)

    @cached_property
    def num_bytes(self) -> int:
        return len(self.header) + sum(spec.num_bytes for spec in self.specs.values())


class MappedFile:
    """An open file with all of its content mapped."""

    def __init__(self, path: Path, *, num_bytes: int | None = None) -> None:
        """Open the file to read it; or, with `num_bytes`, create it to write it. UserError if there is no room."""
        flags = os.O_RDONLY if num_bytes is None else os.O_RDWR | os.O_CREAT | os.O_EXCL
        self._descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
        if num_bytes is not None:
            self._allocate(path, num_bytes)
        status = os.fstat(self._descriptor)
        self.identity = (status.st_dev, status.st_ino)
        access = mmap.ACCESS_READ if num_bytes is None else mmap.ACCESS_WRITE
        self.data = memoryview(mmap.mmap(self._descriptor, status.st_size, access=access))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable")
            self.bytes = torch.frombuffer(self.data, dtype=torch.uint8)

    def _allocate(self, path: Path, num_bytes: int) -> None:
        try:
            # Not truncate: a write to a page for which there is no room would end the process with SIGBUS.
            os.posix_fallocate(self._descriptor, 0, num_bytes)
        except OSError as error:
            path.unlink()
            self.close()
            raise UserError(
                f"{path.parent}: cannot reserve {num_bytes / 2**30:.1f} GiB for a weight file: {error.strerror}; raise "
                "resources.limits.memory of the role"
            ) from error

    def close(self) -> None:
        """Close the file. Its content stays mapped while a tensor or view uses it."""
        os.close(self._descriptor)

    def is_deleted(self) -> bool:
        return os.fstat(self._descriptor).st_nlink == 0

    def lock(self, *, exclusive: bool) -> bool:
        """Return whether the file is locked now."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_NB | (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH))
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def tensors(self) -> Generator[tuple[str, Tensor]]:
        """Yield the tensors of the file's present content, not copied."""
        layout = Layout.read(self.data)
        for name, offset in layout.offsets.items():
            spec = layout.specs[name]
            yield name, self.bytes[offset : offset + spec.num_bytes].view(spec.dtype).view(spec.shape)


class MappedFiles:
    """The files that one reader has mapped: a file that gets a new version is mapped once."""

    def __init__(self) -> None:
        self._files: dict[tuple[int, int], MappedFile] = {}

    def open(self, path: Path) -> MappedFile:
        status = os.stat(path)
        for identity, file in list(self._files.items()):
            if file.is_deleted():
                self._files.pop(identity).close()  # would occupy memory
        identity = (status.st_dev, status.st_ino)
        if identity not in self._files:
            self._files[identity] = MappedFile(path)
        return self._files[identity]


_SHARED_MEMORY = Path("/dev/shm")
_MIN_SHARED_MEMORY_BYTES = 4 << 30
"""Less is for others, such as NCCL and Ray: by default, a container without a volume there has 64 MiB."""

_folders: list[TemporaryFolder] = []
"""Until this process exits."""


def open_scratch_folder(num_bytes: int) -> Path:
    """Create a private folder of this process, deleted when it exits, where `num_bytes` are free. Raise UserError if
    there is no such place."""
    _folders.append(TemporaryFolder("weights", _choose_parent(num_bytes)))
    return _folders[-1].path


def _choose_parent(num_bytes: int) -> Path:
    disk = Path(tempfile.gettempdir())
    free = {folder: _free_bytes(folder) for folder in (_SHARED_MEMORY, disk)}
    if free[_SHARED_MEMORY] >= max(num_bytes, _MIN_SHARED_MEMORY_BYTES):
        return _SHARED_MEMORY
    if free[disk] >= num_bytes:
        return disk
    places = ", ".join(f"{folder} has {size / 2**30:.1f}" for folder, size in free.items())
    raise UserError(
        f"weight files need {num_bytes / 2**30:.1f} GiB of scratch space, but {places}; raise "
        "resources.limits.memory of the role, which limits /dev/shm, or set TMPDIR in its env to a mounted volume"
    )


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free if os.access(folder, os.W_OK | os.X_OK) else 0
