"""Decides when a worker is replaced because of its results. Pure; the pool ends the worker.

A function can spoil its process: it leaks until calls fail, or breaks a global. Such a worker fails fast, so it would
draw most of the work. Invariant: a function that fails often by nature does not cost restarts without end: the failures
in a row that are needed grow with the share of failures that all workers have.
"""

import math
import random

from rljob_api.wire.base import InvalidReason
from rljob_service.results import ExecutionResult

_MIN_FAILURES_IN_ROW = 3
_CHANCE = 1e-3
"""Replace when ordinary failures would make such a row less likely than this."""
_MEMORY_RESULTS = 256
"""Results that the share of failures is estimated from; older ones count half."""
_JITTER = 0.1
_FAILURES = frozenset((InvalidReason.EXCEPTION, InvalidReason.BAD_RETURN, InvalidReason.NOT_FINITE))


def has_failed(replies: ExecutionResult) -> bool:
    """Return whether no sample of the execution has a usable result. Abstaining is one."""
    return all(reply.reason in _FAILURES for reply in replies)


def draw_max_requests(max_requests: int | None) -> float:
    """Return one worker's limit, up to a tenth below the field's, so that not all workers restart at once."""
    return math.inf if max_requests is None else max_requests - int(_JITTER * max_requests * random.random())


class WorkerHistory:
    """The results of one worker since its start."""

    def __init__(self, max_requests: float) -> None:
        self.max_requests = max_requests
        self.num_requests = 0
        self.num_failures_in_row = 0
        self.has_succeeded = False
        self.num_other_successes = 0
        """Successes of all workers when this row of failures began."""


class PoolHealth:
    """Facts come in through `record`, which returns why the worker must be replaced, or an empty string."""

    def __init__(self) -> None:
        self._num_results = 0.0
        self._num_failures = 0.0
        self._num_successes = 0

    def record(self, worker: WorkerHistory, *, failed: bool) -> str:
        worker.num_requests += 1
        if failed:
            reason = self._record_failure(worker)
        else:
            reason = ""
            self._count(1, worker.num_failures_in_row)
            self._num_successes += 1
            worker.num_failures_in_row = 0
            worker.has_succeeded = True
        if not reason and worker.num_requests >= worker.max_requests:
            return f"it served {worker.num_requests} requests (maxRequests)"
        return reason

    def _record_failure(self, worker: WorkerHistory) -> str:
        if worker.num_failures_in_row == 0:
            worker.num_other_successes = self._num_successes
        worker.num_failures_in_row += 1
        num = worker.num_failures_in_row
        if num < self._num_needed():
            return ""
        # Else nothing shows that another process would do better: the function fails for all samples.
        others_succeed = self._num_successes - worker.num_other_successes >= num
        if not worker.has_succeeded and not others_succeed:
            return ""
        self._count(0, num)
        return f"{num} failures in a row"

    def _num_needed(self) -> float:
        if not self._num_failures:
            return _MIN_FAILURES_IN_ROW
        share = self._num_failures / self._num_results
        return math.inf if share >= 1 else max(_MIN_FAILURES_IN_ROW, math.log(_CHANCE) / math.log(share))

    def _count(self, num_successes: int, num_failures: int) -> None:
        """Count a finished row. Unfinished ones do not count: a spoilt worker must not excuse itself."""
        if self._num_results > _MEMORY_RESULTS:
            self._num_results /= 2
            self._num_failures /= 2
        self._num_results += num_successes + num_failures
        self._num_failures += num_failures
