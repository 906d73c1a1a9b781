"""Processes below a process, from the kernel's table; and whether a Ray node still has its raylet."""

from __future__ import annotations

from pathlib import Path


def descendants(ancestor: int) -> list[int]:
    """Processes below `ancestor`, from the kernel's table: the living ones, and dead children that it has to reap.

    The walk goes through the dead too: a process whose first thread has ended is a zombie and still a parent.
    """
    children: dict[int, list[int]] = {}
    dead: set[int] = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The second field, the name, is in parentheses and may hold anything.
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue  # it has just ended
        process = int(stat.parent.name)
        children.setdefault(int(parent), []).append(process)
        if state == "Z" and int(parent) != ancestor:
            dead.add(process)
    found, to_visit = [], [ancestor]
    while to_visit:
        below = children.get(to_visit.pop(), [])
        found += below
        to_visit += below
    return [process for process in found if process not in dead]


class Raylet:
    """The raylet below one `ray start --block`, which itself stays when its raylet ends (because an agent of it was
    killed, say): a node that looks alive and starts nothing any more."""

    def __init__(self, node: int) -> None:
        self._node = node
        self._seen = False

    def has_died(self) -> bool:
        """True once there was one and there is none."""
        alive = any(_name(process) == "raylet" for process in descendants(self._node))
        self._seen = self._seen or alive
        return self._seen and not alive


def _name(process: int) -> str:
    try:
        return Path(f"/proc/{process}/comm").read_text().strip()
    except OSError:
        return ""
