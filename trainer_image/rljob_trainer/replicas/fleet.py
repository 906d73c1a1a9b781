"""Which replica of a role gets the next request. A pure state machine: facts arrive, `pick` decides; `pool` does I/O.

Invariant: a failed replica gets one request at a time, after a backoff, until one succeeds. If the fleet requires a
key, that replica first reports again what it serves: a weight version, or a version of a reward.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from rljob_trainer.outages import Dependency, Outages, pause

_INITIAL_BACKOFF_SECONDS = 0.25
_MAX_BACKOFF_SECONDS = 5.0
"""Short: a restarted replica should get requests at once, and one probe per 5 s costs little."""
_AFFINITY_FACTOR = 1.25
_AFFINITY_SLACK = 4
"""A request follows its cached prefix while that replica has at most FACTOR times the mean number of requests and
SLACK more."""


@dataclass
class Replica:
    address: str
    """With the port for a rollout: a Pod may have several."""
    in_flight: int = 0
    num_served: int = 0
    num_failures: int = 0
    """Consecutive failures."""
    not_before: float = 0.0
    """No request before this time."""
    listed: bool = True
    """Whether discovery lists it now."""
    draining: bool = False
    """It left the list while serving the required key. It gets no new request while another replica works. A replica
    that left the list because of stale weights is not draining: readiness lags behind its weights."""
    serves: str = ""
    """Reported key: GENERATION:VERSION of a rollout's weights, or a reward's version. Empty: not known now."""
    last_version: str = ""
    """Last reported version of the reward. A failure does not clear it."""
    rejected_key: str = ""
    """GENERATION:VERSION that it serves with a digest other than the trainer's."""
    progressed_at: float = -math.inf
    """When a request on it last made progress."""


@dataclass
class Affinity:
    """Where the beginning of the next prompt is in a prefix cache. `Fleet.pick` reads and writes it."""

    group: "Affinity | None" = None
    """For an episode: that of its group, whose episodes begin with the same prompt."""
    address: str = ""
    """The replica that served the episode's last turn, or the group's first one. Empty: none has."""


class Fleet:
    def __init__(
        self,
        health: Dependency | None = None,
        *,
        max_in_flight: int | None = None,
        readiness_lags: bool = True,
        spreads: bool = True,
    ) -> None:
        """`health`: learns whether requests succeed. `readiness_lags`: a replica can leave the list because it lacks
        the required key, without draining. `spreads`: over replicas that are equally loaded; else requests that come
        one after the other stay on one, as long as it works."""
        self.replicas: dict[str, Replica] = {}
        self.required_key = ""
        """The caller sets it: only replicas that serve this key are used; empty: any."""
        self.num_picked = Counter[str]()
        """Requests with an affinity. hit: on the replica with the prefix. spilled: that one was busy, or failing. new:
        none has the prefix, or it has left."""
        self.health = health or Outages().watch("replicas")
        self._max_in_flight = max_in_flight
        self._readiness_lags = readiness_lags
        self._order = 1 if spreads else -1

    def observe_addresses(self, addresses: Iterable[str]) -> None:
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
            # An empty list may be a DNS failure: the known replicas stay usable.
            if not replica.in_flight and (replica.num_failures or (replica.draining and listed)):
                del self.replicas[address]

    def list_usable(self, now: float) -> list[Replica]:
        """Return the replicas that may get a request now."""
        return [
            replica
            for replica in self.replicas.values()
            if self._is_suitable(replica)
            and now >= replica.not_before
            and ((limit := 1 if replica.num_failures else self._max_in_flight) is None or replica.in_flight < limit)
        ]

    def pick(
        self,
        now: float,
        avoid: Collection[str] = (),
        *,
        only_others: bool = False,
        affinity: Affinity | None = None,
    ) -> str | None:
        """Return the usable replica with the fewest requests, or that of `affinity` unless it has many more than the
        mean, and count one more for it. A replica in `avoid` is the last resort; with `only_others` it is never
        picked."""
        usable = self.list_usable(now)
        if any(not r.draining and not r.num_failures and self._is_suitable(r) for r in self.replicas.values()):
            usable = [replica for replica in usable if not replica.draining]
        others = [replica for replica in usable if replica.address not in avoid]
        candidates = others or ([] if only_others else usable)
        if not candidates:
            return None
        # The second criterion spreads a light load over equally loaded replicas, or keeps it on one.
        best = min(candidates, key=lambda each: (each.in_flight, self._order * each.num_served, each.address))
        if affinity is not None:
            group = affinity.group or affinity
            home = self.replicas.get(affinity.address) or self.replicas.get(group.address)
            mean = sum(each.in_flight for each in candidates) / len(candidates)
            if home in candidates and home.in_flight <= _AFFINITY_FACTOR * mean + _AFFINITY_SLACK:
                best = home
            self.num_picked["new" if home is None else "hit" if best is home else "spilled"] += 1
            affinity.address = best.address
            if group.address not in self.replicas:
                group.address = best.address
        best.in_flight += 1
        return best.address

    def record_done(self, address: str) -> None:
        self.health.succeeded()
        if replica := self._release(address):
            replica.num_served += 1
            replica.num_failures = 0

    def record_unused(self, address: str) -> None:
        """The caller sent no request to the picked replica, or stopped waiting for it."""
        self._release(address)

    def record_answered(self, address: str) -> None:
        """The replica answered, though not with a result."""
        self.health.clear()
        if replica := self._release(address):
            replica.num_failures = 0

    def record_busy(self, address: str, until: float) -> None:
        """The replica is healthy, but full."""
        self.health.clear()
        if replica := self._release(address):
            replica.not_before = max(replica.not_before, until)

    def record_progress(self, address: str, now: float) -> None:
        """A request on the replica made progress, which for long ones comes minutes before its end."""
        self.health.succeeded()
        if replica := self.replicas.get(address):
            replica.progressed_at = now

    def record_silent(self, address: str, now: float, seconds: float) -> None:
        """A request made no progress for `seconds`. If others did, the replica is healthy, with a long queue."""
        replica = self.replicas.get(address)
        if replica is not None and now - replica.progressed_at < seconds:
            self._release(address)
        else:
            self.record_failed(address, now, f"{address}: no progress for {seconds:.0f} s")

    def record_updated(self, address: str) -> None:
        """The replica ended a request with newer weights than the request needs: ask again what it serves."""
        self.health.succeeded()
        if replica := self._release(address):
            replica.serves = ""

    def record_failed(self, address: str, now: float, reason: str = "a request failed") -> None:
        self._release(address)
        self.record_suspect(address, now, reason)

    def record_suspect(self, address: str, now: float, reason: str = "a probe failed") -> None:
        """A probe or a request failed: back off, and discard what the replica reported to serve."""
        self.health.failed(reason)
        replica = self.replicas.get(address)
        if replica is None:
            return
        replica.serves = ""
        if now >= replica.not_before:  # an earlier failure belongs to the same burst and must not extend the backoff
            replica.not_before = now + pause(_INITIAL_BACKOFF_SECONDS, _MAX_BACKOFF_SECONDS, replica.num_failures)
            replica.num_failures += 1
        if not replica.listed and not replica.in_flight:
            del self.replicas[address]

    def judge_health(self, *, is_awaited: bool) -> None:
        """Once a tick. `is_awaited`: a caller waits for a replica, so none is usable now."""
        healthy = [replica for replica in self.replicas.values() if not replica.num_failures]
        if any(replica.in_flight for replica in healthy):
            self.health.clear()  # others failed, but what a healthy one executes, perhaps for an hour, may well succeed
        elif self.is_idle() and not is_awaited:
            self.health.clear()
        elif self.is_idle() and not healthy and self.health.failing_since is None:
            self.health.failed(self.health.last_error if self.replicas else "no replica exists")

    def record_serves(self, address: str, key: str) -> None:
        """The replica reported `key`, and its digest is right."""
        if replica := self.replicas.get(address):
            replica.serves = key
            replica.num_failures = 0
            replica.not_before = 0.0
            self.health.succeeded()

    def record_rejected(self, address: str, key: str) -> None:
        """The replica serves `key` with a wrong digest and must not be used for it."""
        if replica := self.replicas.get(address):
            replica.rejected_key = key

    def record_version(self, address: str, version: str) -> None:
        """The replica reported its version of the reward, which proves nothing about its health."""
        replica = self.replicas.get(address)
        if replica is None:
            return
        if replica.last_version and replica.last_version != version:
            self.replicas[address] = self.replicas.pop(address)  # versions() lists it like a new replica
        replica.serves = replica.last_version = version

    def list_unidentified(self, now: float) -> list[str]:
        """Return the replicas to ask for their version now."""
        return [r.address for r in self.replicas.values() if not r.serves and now >= r.not_before]

    def list_unverified(self, now: float) -> list[str]:
        """Return the replicas to ask now whether they serve the required key."""
        return [r.address for r in self.replicas.values() if self._is_unverified(r) and now >= r.not_before]

    def versions(self) -> list[str]:
        """Return the reported versions of replicas that are not draining, in order of appearance. If all are draining,
        discovery may have failed: return theirs."""
        reported = [replica for replica in self.replicas.values() if replica.serves]
        return [replica.serves for replica in [r for r in reported if not r.draining] or reported]

    def is_idle(self) -> bool:
        return not any(replica.in_flight for replica in self.replicas.values())

    def num_serving(self) -> int:
        return sum(replica.serves == self.required_key for replica in self.replicas.values())

    def stragglers(self) -> list[str]:
        """Return the healthy replicas that do not report the required key yet."""
        return [
            replica.address
            for replica in self.replicas.values()
            if self._is_unverified(replica) and not replica.num_failures and not replica.draining
        ]

    def _is_unverified(self, replica: Replica) -> bool:
        return bool(self.required_key) and self.required_key not in (replica.serves, replica.rejected_key)

    def _is_suitable(self, replica: Replica) -> bool:
        return not self.required_key or replica.serves == self.required_key

    def _release(self, address: str) -> Replica | None:
        if replica := self.replicas.get(address):
            replica.in_flight -= 1
        return replica
