"""What a process with many requests shows the server: whether its event loop turns, and which request runs now.

Two words of memory that both map, so the server reads them also while the process holds the interpreter's lock or has
died. User code can write to them, and so falsify what is said of its own process alone. Standard library only.
"""

import mmap
import os

_NUM_BYTES = 16
_BEATS, _CURRENT = 0, 1


def create() -> int:
    """Return the descriptor of a new board."""
    descriptor = os.memfd_create("rljob-board", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, _NUM_BYTES)
    return descriptor


class Board:
    def __init__(self, descriptor: int) -> None:
        """Map the board. The descriptor may be closed afterwards."""
        self._words = memoryview(mmap.mmap(descriptor, _NUM_BYTES)).cast("Q")

    @property
    def beats(self) -> int:
        """Grows while the event loop turns."""
        return self._words[_BEATS]

    @property
    def current(self) -> int:
        """Number of the request whose code runs; 0 if none does, or what runs belongs to no request."""
        return self._words[_CURRENT]

    @current.setter
    def current(self, number: int) -> None:
        self._words[_CURRENT] = number

    def beat(self) -> None:
        self._words[_BEATS] = (self._words[_BEATS] + 1) & 0xFFFFFFFF
