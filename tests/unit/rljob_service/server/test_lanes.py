"""The lanes' guarantees, each by an example, and all together by random histories."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rljob_service.server.lanes import LANES, Lanes


def _start_all(lanes: Lanes[str]) -> list[str]:
    return list(iter(lanes.start_next, None))


def test_requests_of_a_lane_start_in_order_of_arrival() -> None:
    lanes: Lanes[str] = Lanes(slots=2, queue_length=9)
    for job in ("a", "b", "c"):
        assert lanes.admit("train", job)
    assert _start_all(lanes) == ["a", "b"]
    lanes.finish("b")
    assert _start_all(lanes) == ["c"]


def test_evaluation_starts_at_once_behind_a_burst_of_training_requests() -> None:
    lanes: Lanes[str] = Lanes(slots=4, queue_length=99)
    for number in range(50):
        lanes.admit("train", f"t{number}")
    assert len(_start_all(lanes)) == 3, "one of four slots is kept for evaluation"
    lanes.admit("eval", "e")
    assert lanes.start_next() == "e"


def test_server_with_few_slots_reserves_none() -> None:
    lanes: Lanes[str] = Lanes(slots=2, queue_length=9)
    for job in ("a", "b"):
        lanes.admit("train", job)
    assert _start_all(lanes) == ["a", "b"]


def test_lanes_alternate_when_there_is_one_slot() -> None:
    lanes: Lanes[str] = Lanes(slots=1, queue_length=9)
    for number in range(3):
        lanes.admit("train", f"t{number}")
        lanes.admit("eval", f"e{number}")
    order = []
    while (job := lanes.start_next()) is not None:
        order.append(job)
        lanes.finish(job)
    assert order == ["t0", "e0", "t1", "e1", "t2", "e2"]


def test_slots_are_shared_three_to_one_when_both_lanes_wait() -> None:
    lanes: Lanes[str] = Lanes(slots=8, queue_length=99)
    for number in range(20):
        lanes.admit("eval", f"e{number}")
        lanes.admit("train", f"t{number}")
    _start_all(lanes)
    assert (lanes.num_running_in("train"), lanes.num_running_in("eval")) == (6, 2)


def test_full_queue_refuses_only_its_own_lane() -> None:
    lanes: Lanes[str] = Lanes(slots=1, queue_length=2)
    assert lanes.admit("train", "running")
    assert lanes.start_next() == "running"
    assert lanes.admit("train", "a")
    assert lanes.admit("train", "b")
    assert not lanes.admit("train", "c")
    assert lanes.admit("eval", "e")


def test_request_with_a_free_slot_ahead_does_not_count_as_queued() -> None:
    lanes: Lanes[str] = Lanes(slots=3, queue_length=1)
    assert all(lanes.admit("train", str(number)) for number in range(4)), "3 can run and 1 can wait"
    assert not lanes.admit("train", "5th")


def test_only_waiting_requests_can_be_cancelled() -> None:
    lanes: Lanes[str] = Lanes(slots=1, queue_length=9)
    lanes.admit("train", "a")
    lanes.admit("train", "b")
    lanes.start_next()
    assert not lanes.cancel("train", "a")
    assert lanes.cancel("train", "b")
    assert not lanes.cancel("train", "b")
    assert lanes.num_demanded == 1


class LanesMachine(RuleBasedStateMachine):
    """Random histories against a plain model: lists of what waits, sets of what runs."""

    @initialize(slots=st.integers(1, 9), queue_length=st.integers(1, 5))
    def start_empty(self, slots: int, queue_length: int) -> None:
        self.slots, self.queue_length = slots, queue_length
        self.lanes: Lanes[int] = Lanes(slots, queue_length)
        self.waiting: dict[str, list[int]] = {lane: [] for lane in LANES}
        self.running: dict[str, list[int]] = {lane: [] for lane in LANES}
        self.passed_over = dict.fromkeys(LANES, 0)
        self.next = 0

    def total(self) -> int:
        return sum(map(len, self.running.values()))

    @rule(lane=st.sampled_from(LANES))
    def arrive(self, lane: str) -> None:
        admitted = self.lanes.admit(lane, self.next)  # type: ignore[arg-type]
        if admitted:
            self.waiting[lane].append(self.next)
        else:
            assert len(self.waiting[lane]) >= self.queue_length, "refused although the queue was not full"
        self.next += 1

    @rule()
    def start(self) -> None:
        job = self.lanes.start_next()
        if job is None:
            assert not self.waiting["eval"] or self.total() == self.slots, "an evaluation waits although a slot is free"
            spare = self.slots - self.total()
            assert not self.waiting["train"] or spare <= 1, "training waits although two slots are free"
            return
        (lane,) = [lane for lane in LANES if job in self.waiting[lane]]
        assert job == self.waiting[lane].pop(0), "not first in, first out"
        self.running[lane].append(job)
        other = "eval" if lane == "train" else "train"
        self.passed_over[lane] = 0
        self.passed_over[other] += bool(self.waiting[other])
        assert self.passed_over[other] <= 4 * self.slots, "a lane starves"

    @precondition(lambda self: self.total())
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        lane, job = data.draw(st.sampled_from([(lane, job) for lane in LANES for job in self.running[lane]]))
        self.running[lane].remove(job)
        self.lanes.finish(job)

    @precondition(lambda self: any(self.waiting.values()))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        lane, job = data.draw(st.sampled_from([(lane, job) for lane in LANES for job in self.waiting[lane]]))
        self.waiting[lane].remove(job)
        assert self.lanes.cancel(lane, job)  # type: ignore[arg-type]

    @invariant()
    def counts_agree(self) -> None:
        assert self.total() <= self.slots
        assert self.lanes.num_demanded == self.total() + sum(map(len, self.waiting.values()))
        for lane in LANES:
            assert self.lanes.num_waiting(lane) == len(self.waiting[lane])
            assert self.lanes.num_running_in(lane) == len(self.running[lane])
            assert self.lanes.waiting(lane) == self.waiting[lane]
            assert self.lanes.oldest_waiting(lane) == next(iter(self.waiting[lane]), None)


TestLanesMachine = LanesMachine.TestCase
