"""Files that workers leave in a /dev/shm that they share: removed once nothing that may have created them still runs.

Used in containers, which usually do not let a worker mount a private one. No file says which worker created it, so each
belongs to all requests and imports that ran when it appeared. Invariants: a file is removed only after all of these
have ended, and one that existed before the server never.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Hashable, Iterable
from typing import Protocol

from rljob_reward.worker import scratch

_Entry = tuple[str, int]
"""Name and inode."""


class SharedFiles(Protocol):
    def observe(self, running: Iterable[Hashable]) -> None:
        """Note new files: one of `running` has created them."""

    def end(self, ended: Hashable) -> None:
        """Remove the files whose possible creators have all ended."""


class NoSharedFiles:
    """Each worker has private shared memory, or the server cannot know which files are its workers'."""

    def observe(self, running: Iterable[Hashable]) -> None: ...

    def end(self, ended: Hashable) -> None: ...


class SharedFolder:
    def __init__(self, path: str) -> None:
        self._path = path
        self._before = set(self._list())
        self._creators: dict[_Entry, set[Hashable]] = {}

    def observe(self, running: Iterable[Hashable]) -> None:
        entries = self._list()
        new = [entry for entry in entries if entry not in self._creators and entry not in self._before]
        creators = set(running) if new else set()
        kept = set(entries) if self._creators else set()
        self._creators = {entry: found for entry, found in self._creators.items() if entry in kept}
        self._creators |= {entry: set(creators) for entry in new}

    def end(self, ended: Hashable) -> None:
        for (name, inode), creators in list(self._creators.items()):
            creators.discard(ended)
            if not creators:
                del self._creators[name, inode]
                scratch.remove_entry(os.path.join(self._path, name))

    def _list(self) -> list[_Entry]:
        with contextlib.suppress(OSError), os.scandir(self._path) as found:
            return [(entry.name, entry.inode()) for entry in found]
        return []
