"""Which part of a limit this replica may use, from what DNS says of the reward's ready replicas. Pure.

Why the parts of all replicas never add up to more than the limit, though each knows the others by hearsay alone:
let D be the most time until every look-up shows that a replica became ready. A replica holds a part only after it has
seen itself among the ready for 2 D without a break, and only while its last look-up is younger than D. So a holder j
became ready, for good, at least 2 D ago; every holder i looked within the last D, and that look-up shows what was so
2 D ago: i counts j. Each holder therefore counts all m holders, n >= m, and the parts 1/n add up to 1 at most. Whole
numbers go by rank: i ranks no better among those that it counts than among the holders, and the portion falls with
rank and with n, so the portions add up to what m replicas with one view would take, which is the limit.
Who has left is counted until its last request has ended (`leave_seconds`, at least 2 D and the time-out of a request):
it takes nothing new once it no longer sees itself, which is 2 D later at most, and others take over after that. Where D
does not hold, limits may be exceeded for as long: the endpoint then answers 429, which is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """Rank `rank` (from 0) of `count` replicas."""

    rank: int
    count: int

    def part(self, limit: float) -> float:
        return limit / self.count

    def portion(self, limit: int) -> int:
        """Of whole things: all get the same, the first ones one more where it does not divide."""
        return (limit - 1 - self.rank) // self.count + 1


ALONE = Share(0, 1)


class Shares:
    """Facts come in through observe(); share() says what they allow."""

    def __init__(self, own: str, *, propagation_seconds: float, leave_seconds: float) -> None:
        self._own = own
        self._propagation_seconds = propagation_seconds
        self._leave_seconds = leave_seconds
        self._last_seen: dict[str, float] = {}
        self._own_since: float | None = None
        self._looked_at = float("-inf")

    def observe(self, addresses: list[str], now: float) -> None:
        """A look-up's answer. Without any address DNS has failed, or nobody is ready: that says nothing of others."""
        if not addresses:
            return
        if now - self._looked_at > self._propagation_seconds:
            self._own_since = None  # what was in between, nobody knows
        self._looked_at = now
        for address in addresses:
            self._last_seen[address] = now
        if self._own not in addresses:
            self._own_since = None
        elif self._own_since is None:
            self._own_since = now

    def share(self, now: float) -> Share | None:
        """None: no part yet, or no longer."""
        if self._own_since is None or now - self._looked_at > self._propagation_seconds:
            return None
        if now - self._own_since < 2 * self._propagation_seconds:
            return None
        oldest = now - self._leave_seconds
        self._last_seen = {address: seen for address, seen in self._last_seen.items() if seen >= oldest}
        counted = sorted(self._last_seen)
        return Share(counted.index(self._own), len(counted))
