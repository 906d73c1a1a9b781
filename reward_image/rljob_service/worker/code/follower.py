"""Follows a program that a worker has started: passes on what it writes until it has ended. Standard library only."""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import IO

_CHUNK_BYTES = 64 << 10
_MAX_LAST_CHUNKS = 64


class Follower:
    """`takers`: what gets the bytes of each pipe of the process."""

    def __init__(self, process: subprocess.Popen[bytes], takers: Mapping[IO[bytes], Callable[[bytes], object]]) -> None:
        self._ended = os.pidfd_open(process.pid)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._ended, selectors.EVENT_READ)
        for stream, take in takers.items():
            self._selector.register(stream, selectors.EVENT_READ, take)

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *error: object) -> None:
        self._selector.close()
        os.close(self._ended)

    def wait(self, seconds: float | None = None) -> bool:
        """Return whether it has ended within that time."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while (left := None if deadline is None else deadline - time.monotonic()) is None or left > 0:
            if any(key.fileobj == self._ended for key in self._pass_on(left)):
                return True
        return False

    def read_rest(self) -> None:
        """Pass on what is left in the pipes. A process that the program has left behind may still write, without
        end."""
        self._selector.unregister(self._ended)
        for _ in range(_MAX_LAST_CHUNKS):
            if not self._selector.get_map() or not self._pass_on(0):
                break

    def _pass_on(self, timeout: float | None) -> list[selectors.SelectorKey]:
        """Wait for output or the end, pass on what came, and return what was ready."""
        ready = [key for key, _ in self._selector.select(timeout)]
        for key in ready:
            if key.data is None:
                continue
            if data := os.read(key.fd, _CHUNK_BYTES):
                key.data(data)
            else:
                self._selector.unregister(key.fileobj)
        return ready
