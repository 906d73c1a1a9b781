"""Which version of a reward scores a collection. Pure: what the replicas said they serve comes in, the clock is the
caller's.

Owns the choice, and when it is made again. Leaves asking the replicas to `version_watch`, and scoring samples again to
`collection`. Invariant: the pinned version changes only at the begin of a collection, or after no replica has served it
for a while in which another version had one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

UNTOLD = "(unknown)"
"""Stands for the version of a server that tells none."""
PENDING = "(pending)"
"""What to want of replicas while no version is known: none serves it."""
GONE_SECONDS = 3.0
"""How long the pinned version must have had no replica: one that failed a request has told its version again by then,
and a rollout that has finished does not hold up the step for longer."""


class Pin:
    """The version that one reward's results must be of."""

    def __init__(self, gone_seconds: float = GONE_SECONDS) -> None:
        self.version: str | None = None
        """None: no replica has told one yet."""
        self._gone_seconds = gone_seconds
        self._gone_since: float | None = None

    def begin(self, versions: Sequence[str]) -> None:
        """A collection begins. `versions`: what each replica serves, in the order in which replicas appeared."""
        self.version, self._gone_since = choose(versions), None

    def observe(self, versions: Sequence[str], now: float) -> bool:
        """What the replicas serve now; whether another version is pinned from here on."""
        if self.version is None:
            self.version = choose(versions)
            return self.version is not None
        if not versions or self.version in versions:
            self._gone_since = None
            return False
        self._gone_since = now if self._gone_since is None else self._gone_since
        if now - self._gone_since < self._gone_seconds:
            return False
        self.begin(versions)
        return True

    def accepts(self, version: str) -> bool:
        """Whether a result of `version` counts. One that names none (the client's own, or an old server's) does."""
        return not version or self.version in (None, UNTOLD, version)


def choose(versions: Sequence[str]) -> str | None:
    """What most replicas serve; of equals, what the newest replica of them does. None without any."""
    counts = Counter(versions)
    newest = {version: place for place, version in enumerate(versions)}
    return max(counts, key=lambda version: (counts[version], newest[version]), default=None)
