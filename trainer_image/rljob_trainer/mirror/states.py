"""Whether a file has changed since it was copied"""

from pathlib import Path

State = tuple[int, int]
"""Size, and time in nanoseconds."""


def read_state(path: Path) -> State | None:
    """Return the state of a file; None if it does not exist."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_size, found.st_mtime_ns
