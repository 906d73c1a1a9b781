"""Which worker has which request, what each request gets, and when its results replace a worker. Pure.

    request   runs -> (its time is over, or its client has left) ends -> result
    worker    free -> full -> free, backing off (its last request failed), or withdrawn for good

The worker that was used last comes first: its memory is warm, and idle ones stay idle, swapped out, and can be cleaned.
A function can spoil its process: it leaks until calls fail, or breaks a global. Such a worker fails fast, so it would
draw most of the work. The pool ends the workers, WorkerProcess runs the requests.

Invariants: no worker has more requests than slots; one whose last request failed comes last, so with a spare worker a
retry always meets another one. A function that fails often by nature does not cost restarts without end: the failures
in a row that are needed grow with the share of failures that all workers have. Each request gets exactly one result;
one that must end gets the reason for that, whatever its worker answers later; what ends the process never counts
against a request that did not cause it, if the cause is known.
"""

import math
import random
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeVar

from rljob_api.wire.base import InvalidReason
from rljob_service.results import ExecutionResult, failure
from rljob_service.slots import Callback

W = TypeVar("W", bound=Hashable)

_MIN_FAILURES_IN_ROW = 3
_CHANCE = 1e-3
"""Replace when ordinary failures would make such a row less likely than this."""
_MEMORY_RESULTS = 256
"""Results that the share of failures is estimated from; older ones count half."""
_JITTER = 0.1
_FAILURES = frozenset((InvalidReason.EXCEPTION, InvalidReason.BAD_RETURN, InvalidReason.NOT_FINITE))


@dataclass(eq=False)
class Request:
    number: int
    """In the frames of its worker, from 1."""
    body: bytes
    num_samples: int
    callback: Callback
    ends_as: ExecutionResult | None = None
    """Its result, since it must end."""


class RunningRequests(dict[int, Request]):
    """Those of one worker, by number."""

    _last_number = 0

    def start(self, body: bytes, num_samples: int, callback: Callback) -> Request:
        self._last_number += 1
        request = self[self._last_number] = Request(self._last_number, body, num_samples, callback)
        return request

    def must_end(self, number: int, result: ExecutionResult) -> bool:
        """Note why a request must end. Return whether this is news: it runs, and did not have to end before."""
        request = self.get(number)
        if request is None or request.ends_as is not None:
            return False
        request.ends_as = result
        return True

    def finish(self, number: int, result: ExecutionResult) -> tuple[Callback, ExecutionResult]:
        """Take the worker's answer. Return the result, and who gets it. Raise KeyError for what does not run."""
        request = self.pop(number)
        return request.callback, request.ends_as or result

    def end_all(self, result: ExecutionResult, culprit: int = 0) -> list[tuple[Callback, ExecutionResult]]:
        """The process has ended. Return the result of each request.

        `culprit`: the request that caused it; 0 if that is unknown, or if none did.
        """
        ended = dict(self)
        self.clear()
        is_known = culprit in ended and len(ended) > 1
        others = failure(
            InvalidReason.INTERRUPTED,
            f"another request of its process (episodesPerProcess) ended it: {result[0].message}",
        )
        found = []
        for number, request in ended.items():
            default = others if is_known and number != culprit else result
            found.append((request.callback, request.ends_as or default))
        return found


def has_failed(replies: ExecutionResult) -> bool:
    """Return whether no sample of the execution has a usable result. Abstaining is one."""
    return all(reply.reason in _FAILURES for reply in replies)


def draw_max_requests(max_requests: int | None) -> float:
    """Return one worker's limit, up to a tenth below the field's, so that not all workers restart at once."""
    return math.inf if max_requests is None else max_requests - int(_JITTER * max_requests * random.random())


@dataclass(eq=False)
class WorkerState:
    """The slots of one worker, and its results since its start."""

    max_requests: float
    num_running: int = 0
    num_requests: int = 0
    num_failures_in_row: int = 0
    has_succeeded: bool = False
    num_other_successes: int = 0
    """Successes of all workers when this row of failures began."""


class WorkerSlots(dict[W, WorkerState]):
    """The ready workers. Facts come in through its methods; `release` returns why a worker must be replaced."""

    def __init__(self, slots: int = 1) -> None:
        """`slots`: of each worker."""
        super().__init__()
        self._slots = slots
        self._free: dict[W, None] = {}
        """With a free slot; the one that was used last is at the end."""
        self._resting: dict[W, None] = {}
        """The same, and their last request failed; the oldest first."""
        self._num_results = 0.0
        self._num_failures = 0.0
        self._num_successes = 0

    @property
    def has_free(self) -> bool:
        return bool(self._free or self._resting)

    def add(self, worker: W, max_requests: float = math.inf) -> None:
        """Add a worker that runs nothing."""
        self[worker] = WorkerState(max_requests)
        self._free[worker] = None

    def acquire(self) -> W:
        """Return a worker with a free slot, which the caller takes."""
        worker = next(reversed(self._free)) if self._free else next(iter(self._resting))
        state = self[worker]
        state.num_running += 1
        if state.num_running == self._slots:
            self.withdraw(worker)
        return worker

    def release(self, worker: W, *, failed: bool, problem: str = "") -> str:
        """A request of the worker has ended. Return why it must be replaced, or an empty text.

        `problem`: the reason, if the worker has one already; then the request says nothing about it.
        """
        state = self[worker]
        state.num_running -= 1
        self.withdraw(worker)
        if problem:
            return problem
        state.num_requests += 1
        if failed:
            problem = self._record_failure(state)
        else:
            self._count(1, state.num_failures_in_row)
            self._num_successes += 1
            state.num_failures_in_row = 0
            state.has_succeeded = True
        if not problem and state.num_requests >= state.max_requests:
            problem = f"it served {state.num_requests} requests (maxRequests)"
        if not problem:
            (self._resting if failed else self._free)[worker] = None
        return problem

    def withdraw(self, worker: W) -> None:
        """Give the worker no request until its next one ends, or the next release."""
        self._free.pop(worker, None)
        self._resting.pop(worker, None)

    def remove(self, worker: W) -> None:
        """The worker has ended, with what it ran."""
        self.withdraw(worker)
        self.pop(worker, None)

    def _record_failure(self, worker: WorkerState) -> str:
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
