"""Sources in object storage: a run that resumes has the models and data that it began with, or ends.

Owns objects.json. Leaves downloads to what reads the sources: head, ranks and rollouts get locations that name the
version that the head found, so that all read the same bytes. Invariant: from the first checkpoint on, a run never
reads another version: cursors of a checkpoint are numbers of rows, and a model belongs to its adapters and optimizer.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rljob_api.errors import UserError
from rljob_api.phrases import list_some
from rljob_api.run.folder import last_checkpoint
from rljob_api.run.objects import FILE_OBJECTS, ObjectsRecord, read_objects
from rljob_inputs.errors import InputError
from rljob_inputs.objects.access import ObjectAccess, is_object, pin
from rljob_inputs.objects.listing import Listing, list_objects
from rljob_trainer.history.disk import write_durably

_MAX_NAMED = 3


class Versions(NamedTuple):
    """Which objects a job reads."""

    record: ObjectsRecord
    pinned: dict[str, str]
    """By field: the location that names this version, for all processes of the job."""


def find_versions(run_dir: Path, sources: Mapping[str, str], access: ObjectAccess) -> Versions | None:
    """Return the versions of sources, by field; None if none is an object. Of a run that resumes, compare them with
    what it began with.

    Raise InputError if an object is missing or has changed, and StorageAwayError."""
    listings = {field: _list(field, url, access) for field, url in sources.items() if is_object(url)}
    if not listings:
        return None
    found = {
        field: {listing.url_of(name): each.tag for name, each in listing.objects.items()}
        for field, listing in listings.items()
    }
    known = _read_record(run_dir) if last_checkpoint(run_dir) is not None else None
    before = known.tags if known else {}
    for field, tags in found.items():
        if changes := find_changes(before.get(field, tags), tags):
            listed = list_some(changes, _MAX_NAMED)
            problem = f"{listed} changed after the run began ({FILE_OBJECTS}); restore it, or start a new run"
            raise InputError(field, problem)
    pinned = {field: pin(sources[field], listing.digest) for field, listing in listings.items()}
    return Versions(ObjectsRecord(tags={**before, **found}), pinned)


def write_versions(run_dir: Path, record: ObjectsRecord) -> None:
    """Raise OSError of the run's folder."""
    write_durably(run_dir / FILE_OBJECTS, record.model_dump_json(indent=1))


def find_changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the URLs of objects that are new, gone, or have another tag."""
    return [url for url in sorted(before.keys() | now.keys()) if before.get(url) != now.get(url)]


def _list(field: str, url: str, access: ObjectAccess) -> Listing:
    try:
        return list_objects(url, access)
    except UserError as error:
        raise InputError(field, str(error)) from error


def _read_record(run_dir: Path) -> ObjectsRecord | None:
    try:
        return read_objects(run_dir)
    except ValueError as error:
        problem = "is damaged, which says what the run began with; restore it, or start a new run"
        raise InputError("spec.model.source", f"{run_dir / FILE_OBJECTS} {problem}") from error
