"""Files that workers leave in a /dev/shm or /tmp that they share: removed once nothing that may have created them still
runs.

Used in containers, which usually do not let a worker mount private ones. No file says which worker created it, so each
belongs to all requests and imports that ran when it appeared. Invariants: a file is removed only after all of these
have ended, and one that existed before the server never.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Hashable, Iterable
from typing import NamedTuple

from rljob_service.worker.process import scratch

_Entry = tuple[str, int]
"""Name and inode."""


class Share(NamedTuple):
    """A file or folder, and who may have created it: it counts in equal parts against their limits."""

    path: str
    creators: frozenset[Hashable]


class SharedFolder:
    def __init__(self, path: str, *, is_limited: bool = False) -> None:
        """`is_limited`: the file system bounds it."""
        self._path = path
        self._is_limited = is_limited
        self._before = set(self._list())
        self._creators: dict[_Entry, set[Hashable]] = {}

    def observe(self, running: Iterable[Hashable]) -> None:
        """Note new files: one of `running` has created them."""
        entries = self._list()
        new = [entry for entry in entries if entry not in self._creators and entry not in self._before]
        creators = set(running) if new else set()
        kept = set(entries) if self._creators else set()
        self._creators = {entry: found for entry, found in self._creators.items() if entry in kept}
        self._creators |= {entry: set(creators) for entry in new}

    def end(self, ended: Hashable) -> None:
        """Remove the files whose possible creators have all ended."""
        for (name, inode), creators in list(self._creators.items()):
            creators.discard(ended)
            if not creators:
                del self._creators[name, inode]
                scratch.remove_entry(os.path.join(self._path, name))

    def find_shares(self) -> list[Share]:
        """Return what counts against the limit of those who may have created it."""
        if self._is_limited:
            return []
        found = self._creators.items()
        return [Share(os.path.join(self._path, name), frozenset(creators)) for (name, _), creators in found]

    def _list(self) -> list[_Entry]:
        with contextlib.suppress(OSError), os.scandir(self._path) as found:
            return [(entry.name, entry.inode()) for entry in found]
        return []


def count_shares(shares: Iterable[Share], limit: int) -> dict[Hashable, float]:
    """Return the bytes that each creator counts. Blocks; a share above `limit` times its creators is not counted to its
    end."""
    totals: dict[Hashable, float] = {}
    for path, creators in shares:
        part = scratch.entry_bytes(path, limit * max(1, len(creators))) / max(1, len(creators))
        for creator in creators:
            totals[creator] = totals.get(creator, 0.0) + part
    return totals
