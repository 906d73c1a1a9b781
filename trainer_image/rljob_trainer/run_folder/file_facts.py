"""What the files of a checkpoint were when they were written: their sizes and hashes, which a resume compares.

A writer hashes the bytes that it is given, and a reader those that are stored. So errors of disks, file systems and
transfers are found, tampering is not. Invariant: neither side holds a file in memory.
"""

import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash
from pydantic import BaseModel, ConfigDict

from rljob_api.errors import RLJobError
from rljob_trainer.run_folder.client import RemoteFolder

_CHUNK_BYTES = 1 << 20
"""A core has it in its cache when it hashes what was read, or writes what was hashed."""


class DamagedCheckpointError(RLJobError):
    """A file of a checkpoint is not what was written. The message names it, what it should be and what it is."""


class FileFacts(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    num_bytes: int
    hash: str
    """XXH3, 128 bits, hexadecimal."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on the head."""

    folder: Path
    files: Mapping[str, FileFacts]
    """By path below `folder`; those of the ranks in their order."""


class HashedStream(io.RawIOBase):
    """Writes to another stream, and hashes what passes."""

    def __init__(self, stream: io.IOBase) -> None:
        self._stream, self._hash, self._num_bytes = stream, xxhash.xxh3_128(), 0

    @property
    def facts(self) -> FileFacts:
        """The facts of what was written so far."""
        return FileFacts(num_bytes=self._num_bytes, hash=self._hash.hexdigest())

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._num_bytes

    def write(self, data: object) -> int:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        for start in range(0, len(view), _CHUNK_BYTES):
            chunk = view[start : start + _CHUNK_BYTES]
            self._hash.update(chunk)
            self._stream.write(chunk)
        self._num_bytes += len(view)
        return len(view)

    def fileno(self) -> int:
        """Return the descriptor, to sync it: so what is buffered is written first."""
        self._stream.flush()
        return self._stream.fileno()


def describe_file(folder: Path | RemoteFolder, name: str) -> FileFacts:
    """Read and hash a file. Raise FileNotFoundError if it does not exist."""
    stored, num_bytes = xxhash.xxh3_128(), 0
    for chunk in _read_chunks(folder, name):
        stored.update(chunk)
        num_bytes += len(chunk)
    return FileFacts(num_bytes=num_bytes, hash=stored.hexdigest())


def verify_files(folder: Path | RemoteFolder, files: Mapping[str, FileFacts], names: Iterable[str]) -> None:
    """Read these files. Raise DamagedCheckpointError for the first that is not as expected."""
    for name in names:
        expected = files[name]
        try:
            found = describe_file(folder, name)
        except FileNotFoundError:
            raise _missing(folder / name, expected) from None
        _check_size(folder / name, found.num_bytes, expected)
        if found != expected:
            raise DamagedCheckpointError(f"{folder / name} has the hash {found.hash} instead of {expected.hash}")


def verify_sizes(folder: Path, files: Mapping[str, FileFacts]) -> None:
    """Raise DamagedCheckpointError for the first file that does not exist, or has another size. Reads none."""
    for name, expected in files.items():
        try:
            num_bytes = (folder / name).stat().st_size
        except FileNotFoundError:
            raise _missing(folder / name, expected) from None
        _check_size(folder / name, num_bytes, expected)


def _missing(path: Path | RemoteFolder, expected: FileFacts) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"{path} does not exist; it had {expected.num_bytes:,} bytes")


def _check_size(path: Path | RemoteFolder, num_bytes: int, expected: FileFacts) -> None:
    if num_bytes != expected.num_bytes:
        raise DamagedCheckpointError(f"{path} has {num_bytes:,} bytes instead of {expected.num_bytes:,}")


def _read_chunks(folder: Path | RemoteFolder, name: str) -> Iterator[memoryview]:
    """Yield the content in pieces, each valid until the next one."""
    if isinstance(folder, RemoteFolder):
        yield from (memoryview(chunk) for chunk in folder.stream(name))
        return
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with (folder / name).open("rb", buffering=0) as file:
        while num_bytes := file.readinto(buffer):
            yield buffer[:num_bytes]
