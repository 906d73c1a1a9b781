"""Who of a role's replicas gets the next request. A pure state machine: facts come in through observe_* and record_*,
the clock is the caller's, `pick` decides.

Owns: which replicas exist, their load, who is suspect or draining and until when, and which weights (or which version
of a reward) each says it serves. Leaves all I/O, retries and waiting to `replicas`. Invariant: a replica that failed
gets one request at a time, after a pause, until one succeeds; and where what it serves matters, none before it has said
again what that is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

_INITIAL_BACKOFF_SECONDS = 0.25
_MAX_BACKOFF_SECONDS = 5.0
"""Short: a restarted replica should work again at once, and one probe each 5 s costs nothing."""


@dataclass
class Replica:
    """What is known of one address."""

    address: str
    in_flight: int = 0
    num_served: int = 0
    num_failures: int = 0
    """In a row."""
    not_before: float = 0.0
    """No request before this time."""
    listed: bool = True
    """Whether discovery names it now."""
    draining: bool = False
    """It left the list although it served what is wanted: it drains, and gets no new request while another one works.
    One that left the list because it was behind with its weights is used as soon as it has them: readiness lags."""
    serves: str = ""
    """What it said it serves: GENERATION:VERSION of a rollout's weights, or a reward's version. Empty: to be asked."""
    last_version: str = ""
    """What it said last of its reward's version, whatever has happened since."""
    rejected_key: str = ""
    """GENERATION:VERSION that it serves wrongly (its digest differs from the trainer's)."""


class Fleet:
    """The replicas of one role."""

    def __init__(self, *, max_in_flight: int | None = None, readiness_lags: bool = True) -> None:
        """`readiness_lags`: a replica may leave the list because it is behind with what is wanted, and not to end."""
        self.replicas: dict[str, Replica] = {}
        self.required_key = ""
        """Only replicas that serve this are used; empty: any."""
        self.failing_since: float | None = None
        """Since when nothing has succeeded although something was tried; None while all is well."""
        self._max_in_flight = max_in_flight
        self._readiness_lags = readiness_lags

    def observe_addresses(self, addresses: Iterable[str]) -> None:
        """What discovery lists now."""
        listed = set(addresses)
        for address in listed:
            replica = self.replicas.setdefault(address, Replica(address))
            replica.listed, replica.draining = True, False
        for address, replica in list(self.replicas.items()):
            if address in listed:
                continue
            if replica.listed:
                replica.listed = False
                replica.draining = not self._readiness_lags or replica.serves == self.required_key
            # An empty list may be a name server's trouble, and then the old ones are all there is.
            if not replica.in_flight and (replica.num_failures or (replica.draining and listed)):
                del self.replicas[address]

    def require(self, key: str) -> None:
        """From now on use only replicas that serve `key`."""
        self.required_key = key

    def pick(self, now: float, avoid: Collection[str] = (), *, only_others: bool = False) -> str | None:
        """The usable replica with the fewest requests in flight, and count one more. Of `avoid` only if it must, and
        with `only_others` never."""
        usable = [replica for replica in self.replicas.values() if self._is_usable(replica, now)]
        if any(self._is_established(replica) for replica in self.replicas.values()):
            usable = [replica for replica in usable if not replica.draining]
        others = [replica for replica in usable if replica.address not in avoid]
        candidates = others or ([] if only_others else usable)
        if not candidates:
            return None
        # Of equals the one that served least, so that a light load still spreads.
        best = min(candidates, key=lambda replica: (replica.in_flight, replica.num_served, replica.address))
        best.in_flight += 1
        return best.address

    def record_done(self, address: str) -> None:
        """A request ended well."""
        self.failing_since = None
        if replica := self._ended(address):
            replica.num_served += 1
            replica.num_failures = 0

    def record_unused(self, address: str) -> None:
        """A picked replica was not asked after all, or the asker left."""
        self._ended(address)

    def record_busy(self, address: str, until: float) -> None:
        """It is well but full."""
        self.failing_since = None
        if replica := self._ended(address):
            replica.not_before = max(replica.not_before, until)

    def record_failed(self, address: str, now: float) -> None:
        """A request failed: the replica is suspect."""
        self._ended(address)
        self.record_suspect(address, now)

    def record_suspect(self, address: str, now: float) -> None:
        """A probe failed, or a request did: pause, and believe no more what it said of its weights."""
        self.failing_since = now if self.failing_since is None else self.failing_since
        replica = self.replicas.get(address)
        if replica is None:
            return
        replica.serves = ""
        if now >= replica.not_before:  # else: more of the same burst, which must not lengthen the pause
            pause = min(_MAX_BACKOFF_SECONDS, _INITIAL_BACKOFF_SECONDS * 2 ** min(replica.num_failures, 10))
            replica.num_failures += 1
            replica.not_before = now + pause
        if not replica.listed and not replica.in_flight:
            del self.replicas[address]

    def record_no_replica(self, now: float) -> None:
        """Somebody waits and no replica is known or usable."""
        if self.failing_since is None and self.is_idle():
            self.failing_since = now

    def record_serves(self, address: str, key: str) -> None:
        """The replica said what it serves, and its digest is right."""
        if replica := self.replicas.get(address):
            replica.serves = key
            replica.num_failures = 0
            replica.not_before = 0.0
            self.failing_since = None

    def record_rejected(self, address: str, key: str) -> None:
        """The replica serves `key` with the wrong digest: not to be used for it."""
        if replica := self.replicas.get(address):
            replica.rejected_key = key

    def record_version(self, address: str, version: str) -> None:
        """The replica said which version of a reward it is. It proves nothing of its health."""
        replica = self.replicas.get(address)
        if replica is None:
            return
        if replica.last_version and replica.last_version != version:
            self.replicas[address] = self.replicas.pop(address)  # as good as one that has just appeared
        replica.serves = replica.last_version = version

    def list_unidentified(self, now: float) -> list[str]:
        """Replicas that are to say which version they are, and may be asked now."""
        return [r.address for r in self.replicas.values() if not r.serves and now >= r.not_before]

    def versions(self) -> list[str]:
        """What the replicas that stay serve, as far as they told, in the order of their appearance. When discovery
        names none, they may all be there nevertheless."""
        told = [replica for replica in self.replicas.values() if replica.serves]
        return [replica.serves for replica in [r for r in told if not r.draining] or told]

    def list_unverified(self, now: float) -> list[str]:
        """Replicas that have not said that they serve what is wanted, and may be asked now."""
        return [
            replica.address
            for replica in self.replicas.values()
            if self.required_key
            and replica.serves != self.required_key
            and replica.rejected_key != self.required_key
            and now >= replica.not_before
        ]

    def is_idle(self) -> bool:
        """Whether no replica has a request."""
        return not any(replica.in_flight for replica in self.replicas.values())

    def num_serving(self) -> int:
        return sum(replica.serves == self.required_key for replica in self.replicas.values())

    def stragglers(self) -> list[str]:
        """Healthy replicas that are still to say that they serve what is wanted."""
        return [
            replica.address
            for replica in self.replicas.values()
            if replica.serves != self.required_key
            and replica.rejected_key != self.required_key
            and not replica.num_failures
            and not replica.draining
        ]

    def _is_usable(self, replica: Replica, now: float) -> bool:
        if self.required_key and replica.serves != self.required_key:
            return False
        limit = 1 if replica.num_failures else self._max_in_flight
        return now >= replica.not_before and (limit is None or replica.in_flight < limit)

    def _is_established(self, replica: Replica) -> bool:
        """Well and here for longer, though perhaps full now."""
        return (
            not replica.draining
            and not replica.num_failures
            and (not self.required_key or replica.serves == self.required_key)
        )

    def _ended(self, address: str) -> Replica | None:
        replica = self.replicas.get(address)
        if replica:
            replica.in_flight -= 1
        return replica
