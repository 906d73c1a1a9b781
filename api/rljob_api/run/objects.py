"""objects.json: which versions of the objects of s3:// sources a run reads, so that it resumes with the same ones."""

from pathlib import Path

from rljob_api.run.base import Record

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
