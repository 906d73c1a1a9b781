"""Files below a URL of object storage, by name: reads, writes and deletes single ones.

Leaves to callers which file is written last. Invariants: a file under its name is whole, as storages write objects; an
error of this machine's disk is an OSError, and one of the storage is of `errors`.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rljob_api.errors import UserError
from rljob_inputs.objects.access import ObjectAccess, open_client
from rljob_inputs.objects.errors import MissingObjectError, explain, find_disk_error
from rljob_inputs.objects.listing import ObjectFacts
from rljob_inputs.objects.progress import Count, count_bytes


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
