"""Which replicas of a service hang, for the status of the job: a reward, a user, a tool or a runner. Pure.

The servers replace their workers, and the kubelet the servers; this only says so. A sample whose function takes too
long is data, and so are as many as run at once. Invariant: a replica that answered since is never named.
"""

from collections.abc import Container
from dataclasses import dataclass, field

from rljob_api.wire.driver_status import HungPart

_SHOWN_SECONDS = 120.0
"""After its last timeout, unless its limit is longer: perhaps it gets no further request."""


@dataclass
class _Silence:
    since: float
    """When the first of its requests that timed out was sent."""
    last: float
    num_timeouts: int
    message: str


@dataclass
class Hangs:
    """`role`: as in status.roles. `limit_seconds`: of one execution. `slots`: executions at once in a replica."""

    role: str
    limit_seconds: float
    slots: int
    _silences: dict[str, _Silence] = field(default_factory=dict)
    """By address of the replica."""

    def record_timeout(self, replica: str, sent_at: float, now: float, message: str) -> None:
        """An execution, or a whole request, took longer than its limit."""
        known = self._silences.get(replica)
        since = sent_at if known is None else min(known.since, sent_at)
        self._silences[replica] = _Silence(since, now, 1 + (known.num_timeouts if known else 0), message)

    def record_answer(self, replica: str) -> None:
        """It executed a request in time, whatever the result."""
        self._silences.pop(replica, None)

    def list_hung(self, known: Container[str], now: float) -> list[HungPart]:
        """Return the replicas that only time out. `known`: those that exist."""
        shown = max(_SHOWN_SECONDS, 2 * self.limit_seconds)
        self._silences = {
            replica: each for replica, each in self._silences.items() if replica in known and now - each.last < shown
        }
        return [
            HungPart(
                role=self.role,
                name=replica,
                seconds=now - each.since,
                limit_seconds=self.limit_seconds,
                doing=f"{each.num_timeouts} requests in a row timed out, the last one: {each.message}",
                action="its server replaces their processes, and other replicas get the requests",
            )
            for replica, each in self._silences.items()
            if each.num_timeouts > self.slots
        ]
