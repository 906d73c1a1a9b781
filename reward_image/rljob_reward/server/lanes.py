"""Which request runs next: a pure state machine over two queues and one set of slots.

Owns order, fairness and refusal; knows no processes, clocks or sockets. Invariants: never more than `slots` run;
first in, first out within a lane; while both lanes wait, slots are shared 3 to 1 (train to eval), so neither starves;
with four slots or more, train never takes the last one, so an evaluation starts at once behind any burst.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar, get_args

from rljob_api.wire.protocol import Lane

Job = TypeVar("Job", bound=Hashable)

LANES: tuple[Lane, ...] = get_args(Lane)
_WEIGHTS: dict[Lane, int] = {"train": 3, "eval": 1}
_MIN_SLOTS_FOR_RESERVE = 4
"""Below this an idle reserved slot would cost more than a quarter of the training throughput."""


class Lanes(Generic[Job]):
    """Facts come in through admit, finish and cancel; start_next says what to run."""

    def __init__(self, slots: int, queue_length: int) -> None:
        self._slots = slots
        self._queue_length = queue_length
        self._reserved_for_eval = 1 if slots >= _MIN_SLOTS_FOR_RESERVE else 0
        self._waiting: dict[Lane, OrderedDict[Job, None]] = {lane: OrderedDict() for lane in LANES}
        self._running: dict[Lane, set[Job]] = {lane: set() for lane in LANES}
        self._num_running = 0
        self._last_started: Lane = "eval"

    @property
    def num_running(self) -> int:
        return self._num_running

    def num_running_in(self, lane: Lane) -> int:
        return len(self._running[lane])

    def num_waiting(self, lane: Lane) -> int:
        return len(self._waiting[lane])

    def oldest_waiting(self, lane: Lane) -> Job | None:
        """The job that waits longest."""
        return next(iter(self._waiting[lane]), None)

    @property
    def num_demanded(self) -> int:
        """Requests that run or wait."""
        return self._num_running + sum(map(len, self._waiting.values()))

    def jobs(self) -> list[Job]:
        """All that run or wait."""
        return [job for lane in LANES for jobs in (self._running[lane], self._waiting[lane]) for job in jobs]

    def admit(self, lane: Lane, job: Job) -> bool:
        """Take `job` into the lane's queue. False: the queue is full (those with a free slot ahead do not count)."""
        waiting = self._waiting[lane]
        if len(waiting) >= self._queue_length + self._num_free(lane):
            return False
        waiting[job] = None
        return True

    def start_next(self) -> Job | None:
        """The job to run now, which counts as running from here on. None: nothing waits, or no slot is free for it."""
        ready = [lane for lane in LANES if self._waiting[lane] and self._num_free(lane)]
        if not ready:
            return None
        lane = ready[0] if len(ready) == 1 else min(ready, key=self._precedence)
        job, _ = self._waiting[lane].popitem(last=False)
        self._running[lane].add(job)
        self._num_running += 1
        self._last_started = lane
        return job

    def finish(self, lane: Lane, job: Job) -> None:
        """`job` ran and gives its slot back."""
        self._running[lane].remove(job)
        self._num_running -= 1

    def cancel(self, lane: Lane, job: Job) -> bool:
        """Forget `job` if it still waits. False: it runs, or is not known."""
        if job not in self._waiting[lane]:
            return False
        del self._waiting[lane][job]
        return True

    def _num_free(self, lane: Lane) -> int:
        free = self._slots - self._num_running
        if lane == "train" and not self._running["eval"]:
            free -= self._reserved_for_eval
        return max(0, free)

    def _precedence(self, lane: Lane) -> tuple[float, bool]:
        """The lane that holds the smaller part of its share goes first; of equals, the one that did not go last."""
        return len(self._running[lane]) / _WEIGHTS[lane], lane == self._last_started
