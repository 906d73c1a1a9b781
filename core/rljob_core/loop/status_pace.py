"""When to write a status in which only counts of starting Pods have changed.

The Pods of a job are created, placed and started one after the other, and each step changes a count or a message. So
such writes of one job wait for each other, the longer the more jobs start. Invariant: whatever else changes is written
at once, such as a phase, a reason, or a restart; so is what has an event.
"""

from typing import Any

from rljob_api.manifest.status import RLJobStatus
from rljob_core.backend import Key, OwnerStatus, Plan

MIN_WAIT_SECONDS = 5.0
"""Between two such writes of one job."""
MAX_WAIT_SECONDS = 60.0
MAX_WRITES_PER_SECOND = 10.0
"""Limit of all jobs together, up to MAX_WAIT_SECONDS."""
_STARTING = ("Pending", "Queued")


class StatusPace:
    """The last writes of jobs that start. The caller passes the times, in seconds of one clock."""

    def __init__(self) -> None:
        self._written: dict[Key, float] = {}
        """Oldest first; only those of the last MAX_WAIT_SECONDS."""

    def wait_seconds(self, key: Key, stored: OwnerStatus, wanted: Plan[Any], now: float) -> float:
        """Return how long the wanted status must wait; 0: write it now.

        What has an event does not wait: without its status, the next reconcile would record the event again."""
        written = self._written.get(key)
        if written is None or wanted.events or not _differ_in_counts(stored, wanted.status):
            return 0.0
        interval = min(MAX_WAIT_SECONDS, max(MIN_WAIT_SECONDS, len(self._written) / MAX_WRITES_PER_SECOND))
        return max(0.0, written + interval - now)

    def record(self, key: Key, stored: OwnerStatus, written: OwnerStatus, now: float) -> None:
        """Record what replaces the stored status, if it differs."""
        if written == stored:
            return
        self._written.pop(key, None)
        while self._written and now - self._written[first := next(iter(self._written))] > MAX_WAIT_SECONDS:
            del self._written[first]
        if isinstance(written, RLJobStatus) and written.phase in _STARTING:
            self._written[key] = now


def _differ_in_counts(stored: OwnerStatus, wanted: OwnerStatus) -> bool:
    """Whether two statuses of a job that starts differ, and in counts and messages alone."""
    if not (isinstance(stored, RLJobStatus) and isinstance(wanted, RLJobStatus) and wanted.phase in _STARTING):
        return False
    return stored != wanted and _without_counts(stored) == _without_counts(wanted)


def _without_counts(status: RLJobStatus) -> dict[str, Any]:
    return dict(status) | {
        "conditions": [dict(condition) | {"message": ""} for condition in status.conditions],
        "roles": [dict(role) | {"ready": 0} for role in status.roles],
        "rollout_replicas": 0,
        "rollouts": "",
        "rewards": "",
        "progress": None,
    }
