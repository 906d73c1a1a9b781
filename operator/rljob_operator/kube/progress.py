"""How often a training job's progress is reported.

A driver's step and wait change with every poll, and each report costs a reconcile and a write of the status. So the
plan sees the progress of the last report until the next one is due; meanwhile the job stays idle. Invariants: whatever
else an answer contains is seen at once; the last answer of a driver is reported in the end.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from cachetools import TTLCache

from rljob_api.wire.driver_status import DriverStatus
from rljob_core.backend import PROGRESS_POLL_SECONDS, DriverAnswer, Key
from rljob_operator.kube.kept_status import keep_status, read_status

MAX_REPORTS_PER_SECOND = 10.0
"""Limit of all jobs together: with up to 100 training jobs each poll is reported."""
MAX_REPORT_SECONDS = 60.0
"""Between two reports of one job, if its progress has changed; also with more than 600 jobs."""
_DONE = "done"
_MAX_JOBS = 100_000
_FORGET_SECONDS = 600.0
_PROGRESS_FIELDS = (
    "step",
    "phase",
    "waits_for",
    "weight_version",
    "reward",
    "accuracy",
    "tokens_per_second",
    "num_invalid",
    "reward_latency_p50_seconds",
    "reward_latency_p95_seconds",
    "step_seconds",
    "step_limit_seconds",
    "gpu_seconds_per_step",
    "schedule",
)
"""What changes while a job trains. `demand`, which does too, is read fresh by autoscaling."""


@dataclass(frozen=True, slots=True)
class _Reported:
    pod_uid: str
    status: bytes
    """What the plan last saw, as kept_status has it."""
    newest: bytes
    at: float
    lost_at: float | None = None
    """Since when the driver no longer answers."""


class ProgressReports:
    """What the plan sees of each job's driver."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._jobs: TTLCache[Key, _Reported] = TTLCache(_MAX_JOBS, _FORGET_SECONDS, clock)

    @property
    def interval_seconds(self) -> float:
        """Between two reports of one job."""
        return min(MAX_REPORT_SECONDS, max(PROGRESS_POLL_SECONDS, len(self._jobs) / MAX_REPORTS_PER_SECOND))

    def report(self, key: Key, pod_uid: str, answer: DriverAnswer) -> DriverAnswer:
        """Return the answer with the progress that was last reported, or with its own if a report is due."""
        last, now = self._jobs.get(key), self._clock()
        if answer.status is None:
            return self._report_last(key, last, answer, now)
        newest = keep_status(answer.status)
        seen = _with_progress(answer.status, read_status(last.status)) if last and last.pod_uid == pod_uid else None
        if last is None or seen is None or self._is_due(last, seen, answer.status, now):
            self._jobs[key] = _Reported(pod_uid, newest, newest, now)
            return answer
        self._jobs[key] = _Reported(pod_uid, keep_status(seen), newest, last.at)
        return answer._replace(status=seen)

    def _is_due(self, last: _Reported, seen: DriverStatus, status: DriverStatus, now: float) -> bool:
        """Whether to report `status`. `seen` is the same with the progress of the last report."""
        if (status.phase == _DONE) != (seen.phase == _DONE):
            return True
        # Slightly less than the interval: a punctual poll must not miss it.
        return now - last.at >= 0.9 * self.interval_seconds and seen != status

    def _report_last(self, key: Key, last: _Reported | None, answer: DriverAnswer, now: float) -> DriverAnswer:
        """Return the last answer for a while after it, unless its progress has been reported."""
        if last is None or answer.problem or last.newest == last.status:
            return answer
        lost_at = now if last.lost_at is None else last.lost_at
        if now - lost_at >= PROGRESS_POLL_SECONDS:
            self._jobs.pop(key, None)
            return answer
        self._jobs[key] = replace(last, lost_at=lost_at)
        return answer._replace(status=read_status(last.newest))


def _with_progress(status: DriverStatus, reported: DriverStatus) -> DriverStatus:
    """Return `status` with the progress of `reported`."""
    return status.model_copy(update=dict(_progress_of(status, reported)))


def _progress_of(status: DriverStatus, reported: DriverStatus) -> Iterator[tuple[str, object]]:
    for name in _PROGRESS_FIELDS:
        yield name, getattr(reported, name)
    kinds = [[problem.model_copy(update={"count": 0}) for problem in s.problems] for s in (status, reported)]
    if kinds[0] == kinds[1]:
        yield "problems", reported.problems
