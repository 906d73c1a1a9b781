"""Which worker gets the next request: a worker has a fixed number of places. Pure.

The one that was used last comes first: its memory is warm, and idle ones stay idle, swapped out, and can be cleaned.
Invariants: no worker has more requests than places; a worker whose last request failed comes last, so a spoilt one does
not draw the work, and with a spare worker a retry always meets another one.
"""

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

W = TypeVar("W", bound=Hashable)


class Placement(Generic[W]):
    def __init__(self, places: int = 1) -> None:
        """`places`: of each worker."""
        self._places = places
        self._num_running: dict[W, int] = {}
        self._free: list[W] = []
        """With a free place; the one that was used last is at the end."""
        self._resting: deque[W] = deque()
        """The same, and their last request failed; the oldest first."""

    @property
    def has_free(self) -> bool:
        return bool(self._free or self._resting)

    def num_running(self, worker: W) -> int:
        return self._num_running.get(worker, 0)

    def add(self, worker: W) -> None:
        """Add a worker that runs nothing."""
        self._num_running[worker] = 0
        self._free.append(worker)

    def acquire(self) -> W:
        """Return a worker with a free place, which the caller takes."""
        worker = self._free[-1] if self._free else self._resting[0]
        self._num_running[worker] += 1
        if self._num_running[worker] == self._places:
            self._withdraw(worker)
        return worker

    def release(self, worker: W, *, failed: bool, is_kept: bool = True) -> None:
        """A request of the worker has ended. `is_kept`: whether the worker may get further ones."""
        self._num_running[worker] -= 1
        self._withdraw(worker)
        if is_kept:
            (self._resting if failed else self._free).append(worker)

    def hold(self, worker: W) -> None:
        """Give the worker no request until its next one ends, or the next release."""
        self._withdraw(worker)

    def remove(self, worker: W) -> None:
        """The worker has ended, with what it ran."""
        self._withdraw(worker)
        self._num_running.pop(worker, None)

    def _withdraw(self, worker: W) -> None:
        if worker in self._free:
            self._free.remove(worker)
        if worker in self._resting:
            self._resting.remove(worker)
