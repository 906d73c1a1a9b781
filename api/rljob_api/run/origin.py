"""origin.json: the fields of a run's job that its checkpoints depend on, so that no other job resumes from them.

They are the fields that an RLJob may never change (`manifest.immutable_fields`). So a job that is deleted and applied
again resumes if they are equal, as one that is edited does. What a resume may change is recorded with the step.

objects.json has which versions of the objects of s3:// sources a run reads, so that it resumes with the same ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from rljob_api.run.base import Count, Record
from rljob_api.wire.text import clean_line

FILE_ORIGIN = "origin.json"
_MAX_VALUE_LENGTH = 120
_HEAD_BYTES = 1 << 20
"""What a digest reads of each file: a model has gigabytes."""
_FILE_FIELDS: Final = ("source", "file")
UNSET: Final = object()


class RecordedChange(Record):
    """A field that a session changed."""

    after_step: Count
    """The step of the checkpoint from which the session resumed."""
    path: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"after step {self.after_step}: {self.path} is {self.now}; it was {self.before}"


class Origin(Record):
    """The job that the checkpoints of a run are of."""

    fields: dict[str, Any]
    """What may not change, by path, such as spec.model. What has its default is left out, as in the job's file."""
    recorded: dict[str, Any] = {}
    """What may change, as the last session had it."""
    contents: dict[str, str] = {}
    """Digests of the files and folders that both name, by field, such as spec.model.source."""
    changes: tuple[RecordedChange, ...] = ()
    """Oldest first."""

    def find_refused(self, fields: Mapping[str, Any]) -> list[Change]:
        """Return what has changed of what may not. A file or folder that has moved is the same."""
        return [each for each in find_changes(self.fields, fields) if not self._has_moved(each)]

    def find_allowed(self, recorded: Mapping[str, Any]) -> list[Change]:
        """Return the same of what may change. A file under the same path may have another content."""
        changes = [each for each in find_changes(self.recorded, recorded) if not self._has_moved(each)]
        named = {each.path for each in changes}
        edited = (
            Change(path, f"content {known[:12]}", f"content {now[:12]}")
            for path, now in _digest_files(recorded).items()
            if path not in named and (known := self.contents.get(path, now)) != now
        )
        return [*changes, *edited]

    def _has_moved(self, change: Change) -> bool:
        known = self.contents.get(change.path)
        return known is not None and known == digest_content(change.now)

    def resume(self, step: int, recorded: Mapping[str, Any]) -> Origin:
        """Return the record of a session that resumes from the checkpoint of `step`."""
        changes = tuple(
            RecordedChange(after_step=step, path=each.path, before=each.text_before, now=each.text_now)
            for each in self.find_allowed(recorded)
        )
        earlier = tuple(each for each in self.changes if each.after_step <= step)
        contents = self.contents | _digest_files(recorded)
        return self.model_copy(update={"recorded": dict(recorded), "contents": contents, "changes": earlier + changes})


def build_origin(fixed: Mapping[str, Any], recorded: Mapping[str, Any]) -> Origin:
    """Return the record of a run that begins."""
    contents = _digest_files(fixed) | _digest_files(recorded)
    return Origin(fields=dict(fixed), recorded=dict(recorded), contents=contents)


def _digest_files(fields: Mapping[str, Any]) -> dict[str, str]:
    found = {path: digest_content(name) for field, value in fields.items() for path, name in _list_files(field, value)}
    return {path: digest for path, digest in found.items() if digest is not None}


def _list_files(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield what names a file or folder, by path: source and file."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name in _FILE_FIELDS and isinstance(inner, str):
                yield f"{path}.{name}", inner
            yield from _list_files(f"{path}.{name}", inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _list_files(f"{path}[{index}]", inner)


def digest_content(source: Any) -> str | None:
    """Return a digest of the names, the sizes and the beginnings of a file or of a folder's files; None: not there."""
    if not isinstance(source, str) or not (root := Path(source)).is_absolute() or not root.exists():
        return None
    files = sorted(path for path in root.rglob("*") if path.is_file()) if root.is_dir() else [root]
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            name = str(path.relative_to(root)) if root.is_dir() else ""
            digest.update(f"{name} {path.stat().st_size} ".encode() + file.read(_HEAD_BYTES))
    return digest.hexdigest()


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


def list_changes(run_dir: Path) -> tuple[RecordedChange, ...]:
    """Return what the sessions of a run changed, for a page; none if the record is missing or not readable."""
    try:
        origin = read_origin(run_dir)
    except (OSError, ValueError):
        return ()
    return () if origin is None else origin.changes


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


FILE_OBJECTS = "objects.json"


class ObjectsRecord(Record):
    """What the sources in object storage had when the run began."""

    tags: dict[str, dict[str, str]] = {}
    """By the field of the source, such as spec.data.train.source: the tag of each object, by its URL. The tag of S3 is
    its ETag."""


def read_objects(run_dir: Path) -> ObjectsRecord | None:
    """Return the record of a run; None if it has none. Raise ValueError if it is damaged, and OSError."""
    try:
        return ObjectsRecord.model_validate_json((run_dir / FILE_OBJECTS).read_bytes())
    except FileNotFoundError:
        return None
