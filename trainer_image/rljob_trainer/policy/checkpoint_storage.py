"""Where torch's distributed checkpoints are written to and read from: a folder, or the head.

Through the head, each rank's file is one stream, and each tensor one read. Writers hash what they write. Invariants: no
file is whole in memory, or on a disk of the rank's Pod; nothing in a checkpoint is run, neither its index nor its
values, since `rljob export` reads those of a cluster's jobs.
"""

import contextlib
import io
import os
import pathlib
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as records
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from rljob_trainer.run_folder.client import RemoteFile, RemoteFolder
from rljob_trainer.run_folder.file_facts import DamagedCheckpointError, FileFacts, HashedStream

METADATA = ".metadata"
_PARTIAL_SUFFIX = ".tmp"


def _get_member(kind: Any, name: str) -> Enum:
    """Stands for getattr: Python 3.11.0 to 3.11.3, which Debian 12 has, pickle a member of an enumeration by it."""
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        raise DamagedCheckpointError(f"{METADATA} takes {name} of {kind!r}, which no checkpoint does")
    return kind[name]


_DATA_CLASSES = {
    ("builtins", "getattr"): _get_member,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,
    ("pathlib._local", "PosixPath"): pathlib.PurePosixPath,
}
"""What the index of a checkpoint has besides torch's records."""


class CheckpointWriter(FileSystemWriter):
    def __init__(self, folder: Path | RemoteFolder) -> None:
        if isinstance(folder, Path):
            super().__init__(folder)
        else:
            super().__init__("", sync_files=False)  # the head syncs; without a file number, torch would sync all disks
        self.fs: _Files = _Files() if isinstance(folder, Path) else _HeadFiles(folder)

    @property
    def files(self) -> dict[str, FileFacts]:
        """What this rank has written, by name."""
        return self.fs.written


def build_reader(folder: Path | RemoteFolder) -> FileSystemReader:
    return _Reader(folder) if isinstance(folder, Path) else _HeadReader(folder)


def restore(state: dict[str, Any], folder: Path | RemoteFolder) -> None:
    """Read the values of `state` from a checkpoint, in place. Collective. Raise DamagedCheckpointError for what no
    checkpoint has."""
    with first_failure():
        load(state, storage_reader=build_reader(folder), planner=_Values())


@contextlib.contextmanager
def first_failure() -> Iterator[None]:
    """Raise the error of the first rank that failed, in place of torch's collection, which is a BaseException."""
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error


class _Files(FileSystem):
    """What torch does with files, which are hashed while they are written."""

    def __init__(self) -> None:
        self.written: dict[str, FileFacts] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with self._open(path, mode) as stream:
            if mode != "wb":
                yield stream
                return
            hashed = HashedStream(stream)
            yield hashed
        self.written[os.path.basename(path).removesuffix(_PARTIAL_SUFFIX)] = hashed.facts

    def _open(self, path: str | os.PathLike[str], mode: str) -> contextlib.AbstractContextManager[io.IOBase]:
        return super().create_stream(path, mode)


class _HeadFiles(_Files):
    """The same on a folder of the head. Paths are names within it."""

    def __init__(self, folder: RemoteFolder) -> None:
        super().__init__()
        self._folder = folder

    @contextlib.contextmanager
    def _open(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        name = str(path)
        if mode == "wb":
            with self._folder.create(name) as stream:
                yield stream
        elif name == METADATA:
            yield io.BytesIO(self._folder.read(name))
        else:
            with self._folder.open(name) as file:
                yield cast(io.IOBase, file)

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return suffix.removesuffix(_PARTIAL_SUFFIX)  # a file of the head is complete, or does not exist

    def init_path(self, path: str | os.PathLike[str]) -> str:
        return ""

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Nothing: concat_path has given the file its final name."""

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Nothing: the head creates the folders of its files."""

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return False  # the driver deletes an older folder of a checkpoint before the ranks write


class _Index(pickle.Unpickler):
    """Reads the index of a checkpoint, which torch pickles."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _DATA_CLASSES:
            return _DATA_CLASSES[module, name]
        found = vars(torch if module == "torch" else records).get(name)
        is_type = module == "torch" and isinstance(found, torch.dtype)
        is_record = module == records.__name__ and isinstance(found, type) and found.__module__ == module
        if not (is_type or is_record):
            raise DamagedCheckpointError(f"{METADATA} has {module}.{name}, which no checkpoint has")
        return found


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> records.Metadata:
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            index = cast(records.Metadata, _Index(file).load())
        index.storage_meta = index.storage_meta or records.StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index


class _Values(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """torch pickles what is no tensor, and would run what it reads."""
        name = read_item.dest_index.fqn
        if isinstance(self.state_dict[name], torch.Tensor):
            raise DamagedCheckpointError(f"{name} is a tensor, and the checkpoint has another kind of value")
        try:
            found = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise DamagedCheckpointError(f"{name} has a value that no checkpoint has: {error}") from error
        set_element(self.original_state_dict, self.mappings[name], found)


class _HeadReader(_Reader):
    def __init__(self, folder: RemoteFolder) -> None:
        super().__init__("")
        self.fs = _HeadFiles(folder)

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        return io.BytesIO(cast(RemoteFile, file).read_range(sinfo.offset, sinfo.length))
