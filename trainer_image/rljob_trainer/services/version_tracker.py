"""Queries the version of each of a reward's replicas, and restricts requests to replicas of the pinned version.

A replica that failed is queried again: it may have a new version now. VersionPin decides.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence

import aiohttp

from rljob_api.wire.scores import PARTS, Part
from rljob_trainer.concurrency import end_tasks
from rljob_trainer.replicas.pool import ReplicaPool
from rljob_trainer.services.messages import REFUSED_STATUSES, ask_info

UNKNOWN_VERSION = "(unknown)"
"""The version of a server that reports none."""
PENDING = "(pending)"
"""What to require from replicas while no version is known: none serves it."""
ABSENT_SECONDS = 3.0
"""How long the pinned version must have had no replica. A replica that failed a request has reported its version again
by then, and a finished rolling update delays the step no longer than this."""


class VersionPin:
    """Selects the version of a reward that scores a collection. Pure: the caller passes the versions and the time.

    Invariant: the pinned version changes only at the start of a collection, or after it has had no replica for a while
    in which another version had one.
    """

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


log = logging.getLogger(__name__)


class VersionTracker:
    def __init__(self, replicas: ReplicaPool, session: aiohttp.ClientSession, headers: Mapping[str, str]) -> None:
        self.pin = VersionPin()
        self._replicas = replicas
        self._session = session
        self._headers = headers
        self._queries: dict[str, asyncio.Task[None]] = {}
        self._is_collecting = False
        self._reads: dict[str, frozenset[Part]] = {}
        """By version."""

    @property
    def reads(self) -> frozenset[Part]:
        """The parts that requests to the pinned version must have."""
        return self._reads.get(self.pin.version or "", frozenset())

    def begin(self) -> None:
        """Start a collection: pin the version of most replicas, or of the first one that reports it."""
        self._is_collecting = True
        self.pin.begin(self._replicas.fleet.versions())
        self._require_pinned()

    def tick(self) -> None:
        """Query replicas of unknown version, and check whether the pinned version still has a replica."""
        fleet = self._replicas.fleet
        self._queries = {address: task for address, task in self._queries.items() if not task.done()}
        # A version that only a result reported: what it reads is unknown.
        known = {"", *self._reads}
        updated = [address for address, replica in fleet.replicas.items() if replica.serves not in known]
        for address in (*fleet.list_unidentified(self._replicas.now()), *updated):
            if address not in self._queries:
                self._queries[address] = asyncio.create_task(self._identify(address))
        self._update_pin()

    async def close(self) -> None:
        await end_tasks(*self._queries.values())

    def record_result(self, address: str, version: str) -> bool:
        """Return whether a result of `version` counts. If not, record the new version of the address."""
        if self.pin.accepts(version):
            return True
        self._replicas.fleet.record_version(address, version)
        return False

    def _update_pin(self) -> None:
        before = self.pin.version
        if not self._is_collecting or not self.pin.observe(self._replicas.fleet.versions(), self._replicas.now()):
            return
        if before is not None:
            log.warning(
                "%s: version %s has no replicas left; rescoring with %s all samples not used in an update yet",
                self._replicas.name, before, self.pin.version,
            )  # fmt: skip
        self._require_pinned()

    def _require_pinned(self) -> None:
        self._replicas.fleet.required_key = self.pin.version or PENDING
        self._replicas.dispatch()

    async def _identify(self, address: str) -> None:
        fleet = self._replicas.fleet
        try:
            async with ask_info(self._session, address, self._headers) as response:
                if response.status in REFUSED_STATUSES:
                    info = {}
                else:
                    response.raise_for_status()
                    info = await response.json()
                version = str(info.get("version") or "") or UNKNOWN_VERSION
                self._reads[version] = frozenset(part for part in PARTS if part in (info.get("reads") or ()))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, AttributeError) as error:
            name = self._replicas.name
            reason = f"{address}: cannot query its version: {type(error).__name__}: {error}"
            log.info("%s %s", name, reason)
            fleet.record_suspect(address, self._replicas.now(), reason)
            return
        fleet.record_version(address, version)
        self._update_pin()
        self._replicas.dispatch()
