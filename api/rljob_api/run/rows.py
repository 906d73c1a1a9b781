"""rows/: what the job's environment returned for env:// sources, read once.

Each split has a file of JSON lines, and a record next to it. Invariant: the record is written after the file, so a file
that does not have its digest is not complete.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from rljob_api.run.base import Count, Record

ROWS = "rows"


class RowsRecord(Record):
    """What the file of one split has."""

    num_rows: Count
    """Its rows: the first ones of the split."""
    is_whole: bool
    """Whether the split has no others."""
    digest: str
    """SHA-256 of the file."""


def rows_file(run_dir: Path, split: str) -> Path:
    return run_dir / ROWS / f"{split}.jsonl"


def record_file(run_dir: Path, split: str) -> Path:
    return run_dir / ROWS / f"{split}.json"


def digest_rows(lines: Iterable[bytes]) -> str:
    """Return the digest of a file of these lines, each with its end."""
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line)
    return digest.hexdigest()


def read_record(run_dir: Path, split: str) -> RowsRecord | None:
    """Return the record of a split; None if its rows were not read. Raise ValueError if it is damaged, and OSError."""
    try:
        return RowsRecord.model_validate_json(record_file(run_dir, split).read_bytes())
    except FileNotFoundError:
        return None


def read_lines(run_dir: Path, split: str) -> list[bytes]:
    """Return the lines of a split's file, each with its end; none if there is no file."""
    try:
        return rows_file(run_dir, split).read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []
