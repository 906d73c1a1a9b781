"""Rows of files: JSON and CSV, which `text_files` reads, Parquet, and folders of save_to_disk.

Owns which files a path means. Invariant: rows are read lazily and no file is left, not even a cache; every error
names the file and the line or row.
"""

import glob
import io
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import TypeVar

from rljob_api.errors import UserError
from rljob_api.phrases import did_you_mean
from rljob_inputs.data.text_files import BROKEN, COMPRESSED, LINES, Values, open_data, read_text_file
from rljob_inputs.findings import first_line

_File = TypeVar("_File", bound=PurePath)
_BATCH_ROWS = 1_000
_PARQUET = ".parquet"
_SUFFIXES = (".csv", ".tsv", ".json", LINES, _PARQUET)
_KINDS = "a .jsonl, .parquet, .json, .csv or .tsv file"
_SAVED = ("dataset_dict.json", "state.json")
"""Files that `save_to_disk` writes into a folder: with several splits, or with one dataset."""


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
    if (kind := find_kind(path)) is None:
        raise UserError(f"{path}: data must be {_KINDS}, also compressed as .gz, got {path.suffix or 'no suffix'}")
    return _read_parquet(path) if kind == _PARQUET else read_text_file(path, kind)


def choose_files(folder: str, files: Sequence[_File], has_folders: bool) -> list[_File]:
    """Return the data files of a folder: its .jsonl and .parquet files; without any, those of one other kind. `files`:
    in order. Raise UserError if there are none."""
    by_kind: dict[str, list[_File]] = {}
    for file in files:
        if (kind := find_kind(file)) is not None and not file.name.startswith("."):
            by_kind.setdefault(kind, []).append(file)
    if preferred := [*by_kind.get(LINES, []), *by_kind.get(_PARQUET, [])]:
        return sorted(preferred)
    if len(by_kind) > 1:
        raise UserError(
            f"the folder {folder} has {', '.join(by_kind)} files; name those to use, as {folder}/*.csv does"
        )
    if not by_kind:
        remedy = f"; for those below, write {folder}/**/*.parquet" if has_folders else ""
        raise UserError(f"the folder {folder} has no data: {_KINDS}{remedy}")
    return next(iter(by_kind.values()))


def find_kind(path: PurePath) -> str | None:
    """Return which of _SUFFIXES a file has, before one of a compression."""
    name = path.with_suffix("") if path.suffix in COMPRESSED else path
    return name.suffix if name.suffix in _SUFFIXES else None


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
        file = pyarrow.parquet.ParquetFile(path if path.suffix == _PARQUET else io.BytesIO(open_data(path).read()))
        rows = itertools.chain.from_iterable(batch.to_pylist() for batch in file.iter_batches(_BATCH_ROWS))
        yield from ((values, f"{path} row {number}") for number, values in enumerate(rows, 1))
    except (*BROKEN, pyarrow.ArrowException) as error:
        raise UserError(f"{path} is not a readable Parquet file: {error}") from error
