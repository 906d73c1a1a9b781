"""Selects the version of a reward that scores a collection. Pure: the caller passes the versions and the time.

Invariant: the pinned version changes only at the start of a collection, or after it has had no replica for a while in
which another version had one.
"""

from collections import Counter
from collections.abc import Sequence

UNKNOWN_VERSION = "(unknown)"
"""The version of a server that reports none."""
PENDING = "(pending)"
"""What to require from replicas while no version is known: none serves it."""
ABSENT_SECONDS = 3.0
"""How long the pinned version must have had no replica. A replica that failed a request has reported its version again
by then, and a finished rolling update delays the step no longer than this."""


class VersionPin:
    def __init__(self, absent_seconds: float = ABSENT_SECONDS) -> None:
        self.version: str | None = None
        """None: no replica has reported one yet."""
        self._absent_seconds = absent_seconds
        self._absent_since: float | None = None

    def begin(self, versions: Sequence[str]) -> None:
        """Start a collection. `versions`: of each replica, in the order in which the replicas appeared."""
        self.version, self._absent_since = choose_version(versions), None

    def observe(self, versions: Sequence[str], now: float) -> bool:
        """Record the replicas' versions. Return whether another version is pinned from now on."""
        if self.version is None:
            self.version = choose_version(versions)
            return self.version is not None
        if not versions or self.version in versions:
            self._absent_since = None
            return False
        self._absent_since = now if self._absent_since is None else self._absent_since
        if now - self._absent_since < self._absent_seconds:
            return False
        self.begin(versions)
        return True

    def accepts(self, version: str) -> bool:
        """Return whether a result of `version` counts. A result without a version does: the client made it."""
        return not version or self.version in (None, UNKNOWN_VERSION, version)


def choose_version(versions: Sequence[str]) -> str | None:
    """Return the version of most replicas; on a tie, the one with the newest replica. None without replicas."""
    counts = Counter(versions)
    newest = {version: place for place, version in enumerate(versions)}
    return max(counts, key=lambda version: (counts[version], newest[version]), default=None)
