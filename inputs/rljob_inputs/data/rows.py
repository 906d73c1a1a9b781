"""Rows of a dataset, in order and each with its place: JSONL, Parquet, folders of both, and hf://.

Invariant: rows are read lazily, so a check may stop after some; every error names the file and the line or row.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rljob_api.errors import TransientError, UserError
from rljob_api.manifest.job_sections import DataSource
from rljob_inputs.errors import InputError
from rljob_inputs.hub.repository import HubAccess, MissingRevisionError, Repository, find_repository, offline_mode

Values = dict[str, Any]
SUFFIXES = (".jsonl", ".parquet")
_BATCH_ROWS = 1_000
_FORMATS = {
    b"\x1f\x8b": "is compressed with gzip; unpack it",
    b"PK\x03\x04": "is a ZIP archive; unpack it",
    b"PAR1": "is a Parquet file; name it .parquet",
    b"\xff\xfe": "is UTF-16 text; save it as UTF-8",
    b"\xfe\xff": "is UTF-16 text; save it as UTF-8",
}
"""First bytes of files that are often given a wrong name."""


class Row(NamedTuple):
    values: Values
    position: int
    """Position in the dataset, from 0."""
    place: str
    """FILE:LINE of JSONL, else FILE row NUMBER, both from 1."""


def split_field(split: str) -> str:
    """Return the field of spec.data that a split belongs to."""
    return "train" if split == "train" else "eval"


def read_rows(
    source: DataSource, location: str, *, split: str, access: HubAccess | None = None, is_check: bool = False
) -> Iterator[Row]:
    """Yield the rows of `source`, found at `location`: a path, or hf://org/name.

    A check streams a dataset of the Hub. Otherwise it is downloaded and cached. Raise InputError if it is unreadable,
    and TransientError if the Hub cannot be reached.
    """
    field = f"spec.data.{split_field(split)}"
    if location.startswith("hf://"):
        rows = _read_hub(source, location, source.split or split, field, access or HubAccess(), is_check=is_check)
    else:
        rows = _read_files(Path(location), field)
    limited = itertools.islice(rows, source.limit)
    return (Row(values, position, place) for position, (values, place) in enumerate(limited))


def find_files(path: Path) -> list[Path]:
    """Return the data files at a path. Raise UserError if there are none."""
    if path.is_file():
        return [path]
    if not path.exists():
        raise UserError(f"file {path} not found{suggest_path(path)}")
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
    if not files:
        raise UserError(f"the folder {path} has neither .jsonl nor .parquet files")
    return files


def suggest_path(path: Path) -> str:
    """Return a hint for a path that does not exist."""
    if not path.parent.is_dir():
        return f" (folder {path.parent} not found either)"
    near = difflib.get_close_matches(path.name, [entry.name for entry in path.parent.iterdir()], n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _read_files(path: Path, field: str) -> Iterator[tuple[Values, str]]:
    try:
        for file in find_files(path):
            yield from _read_file(file)
    except UserError as error:
        raise InputError(f"{field}.source", str(error)) from error


def _read_file(path: Path) -> Iterator[tuple[Values, str]]:
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path}: data must be .jsonl or .parquet, got {path.suffix or 'no suffix'}")
    return _read_parquet(path) if path.suffix == ".parquet" else _read_jsonl(path)


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
        raise UserError(f"{path}:{number}: not JSON: {error}; each line must be one JSON object") from error
    if not isinstance(row, dict):
        raise UserError(f"{path}:{number}: each line must be a JSON object, got {type(row).__name__}")
    return row


def _read_hub(
    source: DataSource, location: str, split: str, field: str, access: HubAccess, *, is_check: bool
) -> Iterator[tuple[Values, str]]:
    try:
        repository = find_repository(location, "dataset", source.revision, access)
    except UserError as error:
        name = "revision" if isinstance(error, MissingRevisionError) else "source"
        raise InputError(f"{field}.{name}", str(error)) from error
    try:
        table = _load_table(source, repository, split, is_check=is_check)
        if source.limit is not None and not is_check:
            table = table.select(range(min(source.limit, len(table))))
        yield from ((dict(row), f"{location} row {number}") for number, row in enumerate(table, 1))
    except Exception as error:  # `datasets` and its clients raise dozens of types
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise TransientError(f"{location}: cannot read it from the Hub: {type(error).__name__}: {error}") from error
        raise _explain(error, source, location, split, field) from error


def _load_table(source: DataSource, repository: Repository, split: str, *, is_check: bool) -> Any:
    import datasets  # a second to import

    # Read at import only, and a job may name another Hub.
    datasets.config.HF_ENDPOINT = repository.access.url
    is_streamed = is_check and not repository.is_cached
    if is_streamed:
        datasets.config.TORCH_AVAILABLE = False  # else streaming imports torch
    with offline_mode() if repository.is_cached else contextlib.nullcontext():
        return datasets.load_dataset(
            repository.name,
            name=source.subset,
            split=split,
            revision=source.revision,  # not the commit: without a network, the cache is found by the branch's name
            token=repository.access.token,
            streaming=is_streamed,
        )


def _explain(error: Exception, source: DataSource, location: str, split: str, field: str) -> InputError:
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    if "BuilderConfig" in reason or "Config name is missing" in reason:
        given = f"has no subset {source.subset}" if source.subset else "has several subsets"
        return InputError(f"{field}.subset", f"{location} {given}: {_shorten(str(error))}")
    if "split" in reason.lower():
        remedy = "" if source.split else f"; {field}.split is not set, which means {split}"
        return InputError(f"{field}.split", f"{location} has no split {split}: {reason}{remedy}")
    where = f"subset {source.subset}, split {split}"
    return InputError(f"{field}.source", f"{location} ({where}): cannot load the dataset: {reason}")


def _shorten(text: str, max_characters: int = 400) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= max_characters else f"{flat[:max_characters]}..."
