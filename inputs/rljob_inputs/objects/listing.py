"""The objects under a URL, with what identifies their contents: one request, or a few for thousands of objects."""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from rljob_inputs.objects.access import ObjectAccess, open_client, split_url
from rljob_inputs.objects.errors import describe_missing, explain

_TAGS = ("ETag", "etag", "content_md5", "md5Hash", "last_modified", "mtime")
"""What clients call the value that changes with an object's contents, the best one first."""


class ObjectFacts(NamedTuple):
    size: int
    """Bytes."""
    tag: str
    """Changes with the contents: the ETag of S3."""

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> ObjectFacts:
        """Read what a client of fsspec says about an object."""
        tag = next((str(info[name]) for name in _TAGS if info.get(name)), "")
        return cls(int(info.get("size") or 0), tag.strip('"'))


@dataclass(frozen=True)
class Listing:
    """Objects at one time."""

    url: str
    """As the user wrote it: an object, a prefix or a glob."""
    base: str
    """URL of the folder that names are relative to; without a slash at its end."""
    objects: Mapping[str, ObjectFacts]
    """By name below `base`."""
    access: ObjectAccess

    @property
    def digest(self) -> str:
        """Identifies names and contents."""
        facts = sorted((name, *found) for name, found in self.objects.items())
        return hashlib.sha256(json.dumps([self.base, facts]).encode()).hexdigest()[:24]

    @property
    def num_bytes(self) -> int:
        return sum(found.size for found in self.objects.values())

    def url_of(self, name: str) -> str:
        return f"{self.base}/{name}"


def list_objects(url: str, access: ObjectAccess) -> Listing:
    """Return the objects at a URL: one object, all below a prefix, or those that match a glob.

    Raise MissingObjectError if there are none, RefusedObjectError if the credentials may not list, and StorageAwayError
    if the storage does not answer."""
    client = open_client(url, access)
    path = url.partition("://")[2].rstrip("/")
    try:
        found = client.glob(path, detail=True) if glob.has_magic(path) else {}
        found = found or client.find(path, detail=True)  # a key may have the characters of a glob
    except Exception as error:  # each client has dozens of types
        raise explain(error, url, "s3:ListBucket", access) from error
    files = {name: info for name, info in found.items() if info.get("type") != "directory" and not name.endswith("/")}
    if not files:
        raise describe_missing(url, access)
    base = _find_base(path, files)
    objects = {name.removeprefix(f"{base}/"): ObjectFacts.of(info) for name, info in sorted(files.items())}
    return Listing(url, f"{url.partition('://')[0]}://{base}", objects, access)


def _find_base(path: str, files: Mapping[str, Any]) -> str:
    """Return the folder that names are relative to: the prefix; of one object, or a glob, what is before its name."""
    if list(files) == [path]:
        return path.rpartition("/")[0]
    if glob.has_magic(path) and not all(name.startswith(f"{path}/") for name in files):
        parts = path.split("/")
        return "/".join(parts[: next(index for index, part in enumerate(parts) if glob.has_magic(part))])
    return path


def has_objects(url: str, access: ObjectAccess) -> bool:
    """Whether a prefix has any object. Raise as list_objects."""
    client = open_client(url, access)
    bucket, key = split_url(url)
    try:
        return bool(client.find(f"{bucket}/{key}".rstrip("/")))
    except Exception as error:
        raise explain(error, url, "s3:ListBucket", access) from error
