"""Local copies of objects: each is downloaded once on a machine, and a copy never mixes two versions.

A copy is a folder named by the listing's digest, in the user's cache. Invariant: a file that has its name is complete,
and has the contents of the listing. Processes that need the same copy wait for each other.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rljob_api.errors import UserError
from rljob_inputs.objects.access import ObjectAccess, open_client, split_pin
from rljob_inputs.objects.errors import DISK_ERRORS, CopyError, StorageAwayError, describe_changed, explain
from rljob_inputs.objects.listing import Listing, ObjectFacts, list_objects
from rljob_inputs.objects.progress import Progress, count_bytes, describe_bytes

log = logging.getLogger(__name__)
Report = Callable[[str], None]
_MAX_DOWNLOADS = 4
"""Files at the same time; the client reads a large one by several connections."""


def find_cache() -> Path:
    """Return the folder of all copies."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rljob" / "objects"


@dataclass(frozen=True)
class Copy:
    """The copy of a listing. Files that were not needed yet may be missing."""

    listing: Listing
    folder: Path
    report: Report = log.info
    is_pinned: bool = False
    """Whether it must have the contents of the listing, whatever the storage has now."""

    @classmethod
    def of(cls, listing: Listing, report: Report = log.info, *, is_pinned: bool = False) -> Copy:
        return cls(listing, find_cache() / listing.digest, report, is_pinned)

    def fetch(self, name: str) -> Path:
        """Return the local path of an object, which is downloaded unless it is there."""
        self.fetch_all([name])
        return self.folder / name

    def fetch_all(self, names: Iterable[str] | None = None) -> Path:
        """Download what is missing of `names`; None: of all objects. Return the folder.

        Raise UserError for a name that leaves the folder, CopyError if the disk fails, and as `list_objects`;
        StorageAwayError, too, if an object has changed since the listing."""
        wanted = list(self.listing.objects if names is None else names)
        if all(self._is_here(name) for name in wanted):
            return self.folder
        with self._locked():
            missing = [name for name in wanted if not self._is_here(name)]
            self._download(missing)
        return self.folder

    def _is_here(self, name: str) -> bool:
        return self._path(name).is_file()

    def _path(self, name: str) -> Path:
        if name.startswith("/") or ".." in name.split("/"):
            raise UserError(f"{self.listing.url_of(name)}: the key is no path below {self.listing.base}; rename it")
        return self.folder / name

    def _download(self, names: list[str]) -> None:
        listing, total = self.listing, sum(self.listing.objects[name].size for name in names)
        if not names:
            return
        what = f"downloads {listing.url}"
        self.report(f"{what}: {len(names)} files, {describe_bytes(total)}")
        progress = Progress(what, total, self.report)
        client = open_client(listing.url, listing.access)
        with ThreadPoolExecutor(_MAX_DOWNLOADS) as pool:
            list(pool.map(lambda name: self._download_one(client, name, progress), names))

    def _download_one(self, client: Any, name: str, progress: Progress) -> None:
        url, path, access = self.listing.url_of(name), self._path(name), self.listing.access
        remote = url.partition("://")[2]
        partial = path.with_name(f"{path.name}.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            client.get_file(remote, str(partial), callback=count_bytes(progress.add))
            found = ObjectFacts.of(client.info(remote))
        except Exception as error:
            if _is_local(error, self.folder):
                raise self._describe_local(error) from error
            raise explain(error, url, "s3:GetObject", access) from error
        if found != self.listing.objects[name] or partial.stat().st_size != found.size:
            if self.is_pinned:
                raise describe_changed(url)
            raise StorageAwayError(f"{url} has changed while it was read; the next attempt reads the new version")
        partial.rename(path)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context((self.folder.parent / f"{self.folder.name}.lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError as error:
                raise self._describe_local(error) from error
            yield

    def _describe_local(self, error: Exception) -> CopyError:
        return CopyError(
            f"{self.listing.url}: its copy cannot be written to {self.folder.parent} ({error}); free space, or set "
            "XDG_CACHE_HOME to a folder with room"
        )


def open_copy(location: str, access: ObjectAccess, report: Report = log.info) -> Copy:
    """Return the copy of what is at a URL now, or of the version that a pinned location names.

    Raise ChangedObjectsError if the storage has another version, unless this machine has opened it before; and as
    `list_objects`."""
    url, digest = split_pin(location)
    if not digest:
        return Copy.of(list_objects(url, access), report)
    path = find_cache() / f"{digest}.json"
    listing = _read_listing(path, url, access)
    if listing is None or listing.digest != digest:
        listing = list_objects(url, access)
        if listing.digest != digest:
            raise describe_changed(url)
        _write_listing(path, listing)
    return Copy.of(listing, report, is_pinned=True)


def _read_listing(path: Path, url: str, access: ObjectAccess) -> Listing | None:
    try:
        found = json.loads(path.read_bytes())
        objects = {name: ObjectFacts(*facts) for name, facts in found["objects"].items()}
        return Listing(url, found["base"], objects, access)
    except (OSError, ValueError, LookupError, TypeError):  # another process may have been killed while it wrote
        return None


def _write_listing(path: Path, listing: Listing) -> None:
    with contextlib.suppress(OSError):  # it only spares requests, and a download will name the disk's error
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        partial.write_text(json.dumps({"base": listing.base, "objects": listing.objects}))
        partial.replace(path)


def _is_local(error: Exception, folder: Path) -> bool:
    """Whether this machine's disk failed, not the storage, whose client raises OSErrors of its own."""
    if not isinstance(error, OSError):
        return False
    return error.errno in DISK_ERRORS or str(error.filename or "").startswith(f"{folder}/")
