"""Files below a URL of object storage, by name: reads, writes and deletes single ones.

Of single files, callers choose which is written last. Invariants: a file under its name is whole, as storages write
objects; an error of this machine's disk is an OSError, and one of the storage is of `errors`.

Of a folder that becomes objects, the file by which readers recognize a complete one is written last.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rljob_api.errors import UserError
from rljob_inputs.objects.access import ObjectAccess, open_client
from rljob_inputs.objects.copies import Report
from rljob_inputs.objects.errors import MissingObjectError, explain, find_disk_error
from rljob_inputs.objects.listing import ObjectFacts, has_objects
from rljob_inputs.objects.progress import Count, Progress, count_bytes, describe_bytes


class TransferEndedError(Exception):
    """The function that counts the bytes of a transfer ends it."""


@dataclass(frozen=True)
class ObjectFolder:
    url: str
    """Without a slash at its end."""
    access: ObjectAccess
    before_change: Callable[[], object] = lambda: None
    """Called before each change of a file. What it raises prevents the change."""

    def __truediv__(self, name: str) -> ObjectFolder:
        return replace(self, url=f"{self.url}/{name}")

    def list(self) -> dict[str, ObjectFacts]:
        """Return the files by name, such as checkpoints/step-000010/COMPLETE; empty if there are none. Raise UserError
        for a key that is no path on a disk."""
        path = self._path("").rstrip("/")
        with self._explained("", "s3:ListBucket"):
            found = self._client.find(path, detail=True)
        files = {name.removeprefix(f"{path}/"): ObjectFacts.of(info) for name, info in found.items() if name != path}
        files = {name: facts for name, facts in files.items() if name and not name.endswith("/")}
        for name in files:
            if name.startswith("/") or ".." in name.split("/"):
                raise UserError(f"{self.url}/{name}: the key is no path below {self.url}; rename it")
        return files

    def read(self, name: str) -> bytes | None:
        """Return a small file; None if it does not exist."""
        try:
            with self._explained(name, "s3:GetObject"):
                return bytes(self._client.cat_file(self._path(name)))
        except MissingObjectError:  # a missing bucket is found by the first list or write
            return None

    def write(self, name: str, content: bytes) -> None:
        self.before_change()
        with self._explained(name, "s3:PutObject"):
            self._client.pipe_file(self._path(name), content)

    def create(self, name: str, content: bytes) -> bool:
        """Write a file unless it exists. Return whether it was written; storages that know no condition write it."""
        condition = {"overwrite": False} if self.url.startswith("az://") else {"mode": "create"}
        with self._explained(name, "s3:PutObject"):
            try:
                self._client.pipe_file(self._path(name), content, **condition)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno != errno.ENOSYS:
                    raise
                self.write(name, content)
        return True

    def upload(self, file: Path, name: str, count: Count) -> None:
        self.before_change()
        with self._explained(name, "s3:PutObject"):
            self._client.put_file(str(file), self._path(name), callback=count_bytes(count))

    def download(self, name: str, file: Path, count: Count) -> None:
        """Write a file under its own name at once."""
        partial = file.with_name(f".{file.name}.partial")
        with self._explained(name, "s3:GetObject"):
            partial.parent.mkdir(parents=True, exist_ok=True)
            self._client.get_file(self._path(name), str(partial), callback=count_bytes(count))
            partial.replace(file)

    def delete(self, name: str) -> None:
        """Delete a file that exists."""
        self.before_change()
        with self._explained(name, "s3:DeleteObject"):
            self._client.rm_file(self._path(name))

    @property
    def _client(self) -> Any:
        return open_client(self.url, self.access)

    def _path(self, name: str) -> str:
        return f"{self.url.partition('://')[2]}/{name}"

    @contextlib.contextmanager
    def _explained(self, name: str, right: str) -> Iterator[None]:
        try:
            yield
        except TransferEndedError:
            raise
        except Exception as error:  # each client has dozens of types
            if disk := find_disk_error(error):
                raise disk from error
            raise explain(error, f"{self.url}/{name}".rstrip("/"), right, self.access) from error


log = logging.getLogger(__name__)


def require_empty(url: str, access: ObjectAccess) -> None:
    """Raise UserError if there are objects below a URL, and as `list_objects` if they cannot be listed."""
    if has_objects(url, access):
        raise UserError(f"{url}: exists; choose a new prefix")


def upload_folder(
    folder: Path,
    url: str,
    access: ObjectAccess,
    *,
    last: Sequence[str] = (),
    report: Report = log.info,
    wrote: Report = lambda name: None,
) -> None:
    """Write all files of a folder below a URL; those that are named in `last` after all others, in this order. `wrote`
    is called with the name of each when it is there.

    Raise RefusedObjectError if the credentials may not write, and StorageAwayError if the storage does not answer."""
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    order = [*(name for name in files if name not in last), *(name for name in last if name in files)]
    total = sum(path.stat().st_size for path in files.values())
    what = f"uploads {url}"
    report(f"{what}: {len(files)} files, {describe_bytes(total)}")
    progress = Progress(what, total, report)
    objects = ObjectFolder(url.rstrip("/"), access)
    for name in order:
        objects.upload(files[name], name, progress.add)
        wrote(name)
