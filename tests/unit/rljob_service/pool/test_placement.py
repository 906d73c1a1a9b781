"""Which worker gets the next request."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rljob_service.pool.placement import Placement


def test_requests_fill_one_worker_before_the_next() -> None:
    placement: Placement[str] = Placement(2)
    for name in ("a", "b"):
        placement.add(name)
    assert [placement.acquire() for _ in range(4)] == ["b", "b", "a", "a"]
    assert not placement.has_free


def test_worker_that_failed_comes_last() -> None:
    placement: Placement[str] = Placement(2)
    for name in ("a", "b"):
        placement.add(name)
    placement.release(placement.acquire(), failed=True)
    assert [placement.acquire() for _ in range(4)] == ["a", "a", "b", "b"]


class PlacementMachine(RuleBasedStateMachine):
    """Against a count of each worker's requests."""

    PLACES = 3

    def __init__(self) -> None:
        super().__init__()
        self.placement: Placement[int] = Placement(self.PLACES)
        self.running: dict[int, int] = {}
        self.withdrawn: set[int] = set()
        self.number = 0

    @property
    def free(self) -> set[int]:
        return {each for each, num in self.running.items() if num < self.PLACES} - self.withdrawn

    @rule()
    def add(self) -> None:
        self.number += 1
        self.placement.add(self.number)
        self.running[self.number] = 0

    @precondition(lambda self: self.free)
    @rule()
    def acquire(self) -> None:
        worker = self.placement.acquire()
        assert worker in self.free, "a worker without a free place got a request"
        self.running[worker] += 1

    @precondition(lambda self: any(self.running.values()))
    @rule(data=st.data(), failed=st.booleans(), is_kept=st.booleans())
    def release(self, data: st.DataObject, failed: bool, is_kept: bool) -> None:
        worker = data.draw(st.sampled_from([each for each, num in self.running.items() if num]))
        is_kept = is_kept and worker not in self.withdrawn
        self.placement.release(worker, failed=failed, is_kept=is_kept)
        self.running[worker] -= 1
        if not is_kept:
            self.withdrawn.add(worker)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(list(self.running)))
        self.placement.remove(worker)
        del self.running[worker]
        self.withdrawn.discard(worker)

    @invariant()
    def knows_what_is_free(self) -> None:
        assert self.placement.has_free == bool(self.free)
        assert all(self.placement.num_running(worker) == num for worker, num in self.running.items())


TestPlacementMachine = PlacementMachine.TestCase
