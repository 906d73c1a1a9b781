"""origin.json: the fields of a run's job that its checkpoints depend on, so that no other job resumes from them.

They are the fields that an RLJob may never change (`manifest.immutable_fields`). So a job that is deleted and applied
again resumes if they are equal, as one that is edited does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from rljob_api.run.base import Record
from rljob_api.wire.text import clean_line

FILE_ORIGIN = "origin.json"
_MAX_VALUE_LENGTH = 120
UNSET: Final = object()


class Origin(Record):
    """The job that the checkpoints of a run are of."""

    fields: dict[str, Any]
    """Values by path, such as spec.model. What has its default is left out, as in the job's file."""


class Change(NamedTuple):
    """A field that two jobs have with different values."""

    path: str
    before: Any
    """Its value; UNSET: it has its default."""
    now: Any

    @property
    def text_before(self) -> str:
        """The value as messages have it."""
        return _show(self.before)

    @property
    def text_now(self) -> str:
        return _show(self.now)


def read_origin(run_dir: Path) -> Origin | None:
    """Return the record of a run; None if it has none. Raise ValueError if it is damaged, and OSError."""
    try:
        return Origin.model_validate_json((run_dir / FILE_ORIGIN).read_bytes())
    except FileNotFoundError:
        return None


def find_changes(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[Change]:
    """Yield the fields that differ: as deep as both have them."""
    for name in sorted(before.keys() | now.keys()):
        yield from _compare(f"{prefix}{name}", before.get(name, UNSET), now.get(name, UNSET))


def _compare(path: str, before: Any, now: Any) -> Iterator[Change]:
    if isinstance(before, dict) and isinstance(now, dict):
        yield from find_changes(before, now, f"{path}.")
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for index, (old, new) in enumerate(zip(before, now, strict=True)):
            yield from _compare(f"{path}[{index}]", old, new)
    elif before != now:
        yield Change(path, before, now)


def _show(value: Any) -> str:
    return "its default" if value is UNSET else clean_line(json.dumps(value, ensure_ascii=False), _MAX_VALUE_LENGTH)
