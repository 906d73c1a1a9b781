"""Rows of files: JSON lines and Parquet, and by the library `datasets` what else it reads from the Hub.

Owns which files a path means. Invariant: rows are read lazily and no file is left, not even a cache; every error
names the file and the line or row.
"""

from __future__ import annotations

import glob
import itertools
import json
import logging
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any, TypeVar

from rljob_api.errors import UserError
from rljob_api.phrases import did_you_mean
from rljob_inputs.errors import first_line

LOADING = threading.Lock()
"""Held while `datasets` opens data: its progress bars fail where two threads do so, such as the checks of two files."""
Values = dict[str, Any]
_File = TypeVar("_File", bound=PurePath)
_BATCH_ROWS = 1_000
_LINES, _PARQUET = ".jsonl", ".parquet"
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_BUILDERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".parquet": ("parquet", {}),
}
"""The builder of `datasets` for a suffix, and its settings."""
_KINDS = "a .jsonl, .parquet, .json, .csv or .tsv file"
_SAVED = ("dataset_dict.json", "state.json")
"""Files that `save_to_disk` writes into a folder: with several splits, or with one dataset."""
_FORMATS = {
    b"\x1f\x8b": "is compressed with gzip; name it .jsonl.gz",
    b"PK\x03\x04": "is a ZIP archive; unpack it",
    b"PAR1": "is a Parquet file; name it .parquet",
    b"\xff\xfe": "is UTF-16 text; save it as UTF-8",
    b"\xfe\xff": "is UTF-16 text; save it as UTF-8",
}
"""First bytes of files that are often given a wrong name."""


def find_files(path: Path) -> list[Path]:
    """Return the data files, or the one folder of `save_to_disk`, at a path or glob. Raise UserError if there are none.

    Of a folder these are its .jsonl and .parquet files; without any, its files of one other kind."""
    if path.is_file() or is_saved(path):
        return [path]
    if path.is_dir():
        entries = sorted(path.iterdir())
        return choose_files(str(path), [each for each in entries if not each.is_dir()], any(map(Path.is_dir, entries)))
    if not glob.has_magic(str(path)):
        raise UserError(f"file {path} not found{suggest_path(path)}")
    found = sorted(Path(each) for each in glob.glob(str(path), recursive=True))
    files = [each for each in found if each.is_file()]
    if not files:
        raise UserError(f"no file matches {path}")
    return files


def is_saved(path: Path) -> bool:
    """Return whether a folder is one of `datasets`' save_to_disk."""
    return has_saved(name for name in _SAVED if (path / name).is_file())


def has_saved(names: Iterable[str]) -> bool:
    """The same by the names of a folder's files."""
    return any(name in _SAVED for name in names)


def list_splits(path: Path) -> list[str]:
    """Return the splits of a folder of save_to_disk; none of other data."""
    listed = path / _SAVED[0]
    return list(json.loads(listed.read_text())["splits"]) if listed.is_file() else []


def suggest_path(path: Path) -> str:
    """Return a hint for a path that does not exist."""
    if not path.parent.is_dir():
        return f" (folder {path.parent} not found either)"
    hint = did_you_mean(path.name, (entry.name for entry in path.parent.iterdir()))
    return hint and f"; {hint}"


def read_file(path: Path, split: str) -> Iterator[tuple[Values, str]]:
    """Yield each row of a file, or of a split of a folder of save_to_disk, with its place. Raise UserError."""
    if is_saved(path):
        return _read_saved(path, split)
    if (kind := _find_kind(path)) is None:
        raise UserError(f"{path}: data must be {_KINDS}, also compressed as .gz, got {path.suffix or 'no suffix'}")
    if path.suffix == _LINES:
        return _read_jsonl(path)
    return _read_parquet(path) if path.suffix == _PARQUET else _read_other(path, kind)


def choose_files(folder: str, files: Sequence[_File], has_folders: bool) -> list[_File]:
    """Return the data files of a folder: its .jsonl and .parquet files; without any, those of one other kind. `files`:
    in order. Raise UserError if there are none."""
    by_kind: dict[str, list[_File]] = {}
    for file in files:
        if (kind := _find_kind(file)) is not None and not file.name.startswith("."):
            by_kind.setdefault(kind, []).append(file)
    if preferred := [*by_kind.get(_LINES, []), *by_kind.get(_PARQUET, [])]:
        return sorted(preferred)
    if len(by_kind) > 1:
        raise UserError(
            f"the folder {folder} has {', '.join(by_kind)} files; name those to use, as {folder}/*.csv does"
        )
    if not by_kind:
        remedy = f"; for those below, write {folder}/**/*.parquet" if has_folders else ""
        raise UserError(f"the folder {folder} has no data: {_KINDS}{remedy}")
    return next(iter(by_kind.values()))


def _find_kind(path: PurePath) -> str | None:
    """Return the suffix of _BUILDERS that a file has, before one of a compression."""
    name = path.with_suffix("") if path.suffix in _COMPRESSED else path
    return name.suffix if name.suffix in _BUILDERS else None


def _read_other(path: Path, kind: str) -> Iterator[tuple[Values, str]]:
    """Stream a file by `datasets`, as it reads one of the Hub."""
    import datasets  # a second to import

    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # it logs the errors that are raised here
    builder, settings = _BUILDERS[kind]
    datasets.config.TORCH_AVAILABLE = False  # else streaming imports torch
    settings = {"split": "train", "streaming": True, **settings}
    try:
        with LOADING, tempfile.TemporaryDirectory() as cache:  # for the file of a lock
            rows = datasets.load_dataset(builder, data_files=[str(path)], cache_dir=cache, **settings)
        yield from ((dict(values), f"{path} row {number}") for number, values in enumerate(rows, 1))
    except Exception as error:  # `datasets` and its readers raise dozens of types
        raise UserError(f"{path} is not readable as {kind}: {_describe_cause(error)}") from error


def _read_saved(path: Path, split: str) -> Iterator[tuple[Values, str]]:
    import datasets

    try:
        table = datasets.load_from_disk(str(path))
    except Exception as error:
        raise UserError(f"{path} is not a readable folder of save_to_disk: {_describe_cause(error)}") from error
    if isinstance(table, datasets.DatasetDict):
        if split not in table:
            raise UserError(f"{path} has no split {split}; it has {', '.join(table)}: set split")
        table = table[split]
    yield from ((dict(values), f"{path} row {number}") for number, values in enumerate(table, 1))


def _describe_cause(error: BaseException) -> str:
    """Return the cause that a library's own error wraps."""
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {first_line(cause)}"


def _read_parquet(path: Path) -> Iterator[tuple[Values, str]]:
    import pyarrow.parquet  # heavy, and most jobs do not need it

    try:
        file = pyarrow.parquet.ParquetFile(path)
        rows = itertools.chain.from_iterable(batch.to_pylist() for batch in file.iter_batches(_BATCH_ROWS))
        yield from ((values, f"{path} row {number}") for number, values in enumerate(rows, 1))
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{path} is not a readable Parquet file: {error}") from error


def _read_jsonl(path: Path) -> Iterator[tuple[Values, str]]:
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")  # editors on Windows write this mark
                if line.strip():
                    yield _parse_line(path, number, line), f"{path}:{number}"
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def _parse_line(path: Path, number: int, line: bytes) -> Values:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError as error:
        formats = (message for start, message in _FORMATS.items() if number == 1 and line.startswith(start))
        problem = f"is not UTF-8 text (byte {line[error.start]:#04x}); save it as JSON lines in UTF-8"
        raise UserError(f"{path}:{number}: {next(formats, problem)}") from error
    except (ValueError, RecursionError) as error:
        if number == 1 and line.strip() == b"[":
            raise UserError(f"{path}:1: is a JSON array; name it .json") from error
        raise UserError(f"{path}:{number}: not JSON: {error}; each line must be one JSON object") from error
    if not isinstance(row, dict):
        raise UserError(f"{path}:{number}: each line must be a JSON object, got {type(row).__name__}")
    return row
