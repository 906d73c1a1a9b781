"""Which request runs next: a pure state machine over two queues and one set of slots.

Owns order, fairness and refusal; knows no processes, clocks or sockets. Invariants: never more than `slots` run; first
in, first out within a lane. While both lanes wait, they share the slots 3 to 1 (train to eval), so neither starves.
With four slots or more, train never takes the last one, so an evaluation starts at once behind any burst.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar, get_args

from rljob_api.wire.base import Lane

Item = TypeVar("Item", bound=Hashable)

LANES: tuple[Lane, ...] = get_args(Lane)
_WEIGHTS: dict[Lane, int] = {"train": 3, "eval": 1}
MIN_SLOTS_FOR_RESERVE = 4
"""Below this an idle reserved slot would cost more than a quarter of the training throughput."""


class Lanes(Generic[Item]):
    """Facts come in through admit, finish and cancel; start_next returns what to run."""

    def __init__(self, slots: int, queue_length: int) -> None:
        self._slots = slots
        self._queue_length = queue_length
        self._reserved_for_eval = 1 if slots >= MIN_SLOTS_FOR_RESERVE else 0
        self._waiting: dict[Lane, OrderedDict[Item, None]] = {lane: OrderedDict() for lane in LANES}
        self._running: dict[Item, Lane] = {}
        self._num_running_in = dict.fromkeys(LANES, 0)
        self._num_waiting = 0
        self._last_started: Lane = "eval"

    def num_running_in(self, lane: Lane) -> int:
        return self._num_running_in[lane]

    def num_waiting(self, lane: Lane) -> int:
        return len(self._waiting[lane])

    @property
    def has_waiting(self) -> bool:
        return self._num_waiting > 0

    @property
    def num_demanded(self) -> int:
        """Requests that run or wait."""
        return len(self._running) + self._num_waiting

    @property
    def num_running(self) -> int:
        return len(self._running)

    def running_newest_first(self) -> Iterator[Item]:
        return reversed(self._running)

    def running_oldest_first(self) -> Iterator[Item]:
        return iter(self._running)

    def waiting(self, lane: Lane) -> list[Item]:
        """Items that wait, the oldest first."""
        return list(self._waiting[lane])

    def oldest_waiting(self, lane: Lane) -> Item | None:
        return next(iter(self._waiting[lane]), None)

    def admit(self, lane: Lane, item: Item) -> bool:
        """Append `item` to the lane's queue. False: the queue is full (items with a free slot ahead do not count)."""
        waiting = self._waiting[lane]
        if len(waiting) >= self._queue_length + self._num_free(lane):
            return False
        waiting[item] = None
        self._num_waiting += 1
        return True

    def start_next(self) -> Item | None:
        """Return the item to run now and count it as running. None: nothing waits, or no slot is free for it."""
        if not self._num_waiting:
            return None
        ready = [lane for lane in LANES if self._waiting[lane] and self._num_free(lane)]
        if not ready:
            return None
        lane = ready[0] if len(ready) == 1 else min(ready, key=self._precedence)
        item, _ = self._waiting[lane].popitem(last=False)
        self._num_waiting -= 1
        self._running[item] = lane
        self._num_running_in[lane] += 1
        self._last_started = lane
        return item

    def finish(self, item: Item) -> None:
        self._num_running_in[self._running.pop(item)] -= 1

    def cancel(self, lane: Lane, item: Item) -> bool:
        """Drop `item` if it still waits. False: it runs, or is unknown."""
        if item not in self._waiting[lane]:
            return False
        del self._waiting[lane][item]
        self._num_waiting -= 1
        return True

    def _num_free(self, lane: Lane) -> int:
        free = self._slots - len(self._running)
        if lane == "train" and not self._num_running_in["eval"]:
            free -= self._reserved_for_eval
        return max(0, free)

    def _precedence(self, lane: Lane) -> tuple[float, bool]:
        """Sort key: the lane with the smaller part of its share first; on a tie, the one that did not start last."""
        return self._num_running_in[lane] / _WEIGHTS[lane], lane == self._last_started
