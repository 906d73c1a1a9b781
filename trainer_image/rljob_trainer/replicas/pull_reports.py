"""What the rollouts do that do not serve the newest weights yet, whether any of them gets nearer to it, and whose
engine hangs. Pure.

Replicas report with each poll of the head, also those that no Service lists because they are not ready. Invariant: a
second attempt at a download counts as progress only beyond the first.
"""

from collections.abc import Container
from dataclasses import dataclass

from rljob_api.phrases import list_some
from rljob_api.wire.driver_status import HungPart
from rljob_api.wire.weights import PullReport

_MAX_REASONS = 5
_MAX_REPLICAS_PER_REASON = 4
ROLLOUT = "rollout"
"""The role of replicas in HungPart."""
_SHOWN_SECONDS = 90.0
"""The operator of many jobs reads the status once a minute."""
_MAX_AGE_SECONDS = 60.0
"""Older reports are of replicas that no longer exist. A replica reports at least every 30 s."""


@dataclass
class _Pull:
    report: PullReport
    reported_at: float
    furthest: int


class PullReports:
    def __init__(self) -> None:
        self._pulls: dict[str, _Pull] = {}
        """By replica."""
        self._progressed_at = 0.0
        self._hung: dict[str, tuple[HungPart, float]] = {}
        """What replicas said before they ended, and when, by replica."""

    def record(self, report: PullReport, now: float) -> None:
        before = self._pulls.get(report.replica)
        is_new = before is None or before.report.key != report.key
        furthest = report.progress if before is None or is_new else max(before.furthest, report.progress)
        if is_new or report.is_draining or (before is not None and furthest > before.furthest):
            self._progressed_at = now
        self._pulls[report.replica] = _Pull(report, now, furthest)

    def record_hung(self, part: HungPart, now: float) -> None:
        """A replica ends because its engine hangs."""
        self._hung[part.name] = part, now

    def record_serves(self, replica: str) -> None:
        """It serves the newest weights, after a restart if it hung."""
        self._hung.pop(replica, None)

    def list_hung(self, known: Container[str], now: float) -> list[HungPart]:
        """Return the replicas that hung, until they serve again or are no longer `known`; and other engines of trainer
        Pods, for a while: whom they serve knows when they answer again, the driver does not."""
        self._hung = {
            name: (part, at)
            for name, (part, at) in self._hung.items()
            if name in known or (part.role != ROLLOUT and now - at < _SHOWN_SECONDS)
        }
        return [part.model_copy(update={"seconds": part.seconds + now - at}) for part, at in self._hung.values()]

    def describe_stalled(self, key: str, since: float, seconds: float, now: float) -> str:
        """Return each replica's reason if none has got nearer to the weights `key` since `since`, or for `seconds`.
        Empty also if no replica reports: then Pods are missing, which the operator handles."""
        if now - max(since, self._progressed_at) < seconds:
            return ""
        return _describe(self._recent(key, now))

    def describe_errors(self, key: str, now: float) -> str:
        return _describe([report for report in self._recent(key, now) if report.error])

    def _recent(self, key: str, now: float) -> list[PullReport]:
        recent = [pull.report for pull in self._pulls.values() if now - pull.reported_at < _MAX_AGE_SECONDS]
        return [report for report in recent if report.key == key]


def _describe(reports: list[PullReport]) -> str:
    """`10.0.0.7, 10.0.0.8: no space left; 10.0.0.9: ...`"""
    replicas: dict[str, list[str]] = {}
    for report in reports:
        replicas.setdefault(report.error or "no error", []).append(report.replica)
    reasons = [f"{list_some(names, _MAX_REPLICAS_PER_REASON)}: {error}" for error, names in replicas.items()]
    return list_some(reasons, _MAX_REASONS, "; ")
