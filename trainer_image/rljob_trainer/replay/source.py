"""The recorded groups of one step, as its updates take them. Pure.

Invariant: each group is taken once, in the order in which it trained, and groups that one call of the trainer had are
one call again, as far as the mini-batches of the job allow. So sums of floating-point numbers have their order.
"""

from collections import deque
from collections.abc import Sequence
from itertools import groupby

from rljob_trainer.episodes.types import Group


class RecordedGroups:
    """Takes the place of the lane: a driver.updates.ScoredGroups."""

    def __init__(self, groups: Sequence[Group]) -> None:
        """`groups`: of a whole step, in the order in which they trained."""
        self._parts = deque(list(part) for _, part in groupby(groups, key=_part_of))

    async def take(self, limit: int, wait_seconds: float | None = None) -> list[Group]:
        """Return the next part, or as much of it as the mini-batch has room for. With `wait_seconds`, which the step
        asks for after it has taken some: nothing, since the next part was another call."""
        if wait_seconds is not None:
            return []
        part = self._parts.popleft()
        if part[limit:]:
            self._parts.appendleft(part[limit:])
        return part[:limit]

    def is_generating(self) -> bool:
        return False

    async def rescore_stale(self, groups: Sequence[Group]) -> None:
        """There is nothing to do: the log has the scores that trained."""


def _part_of(group: Group) -> tuple[int, int]:
    assert group.trained_as is not None, "a group of the log has trained"
    return group.trained_as.update, group.trained_as.part
