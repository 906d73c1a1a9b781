"""Which worker gets the next request, when its results replace it, and what each request gets: exactly one result, and
never one that another request caused."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rljob_api.wire.base import InvalidReason
from rljob_service.pool.worker_slots import RunningRequests, WorkerSlots, draw_max_requests, has_failed
from rljob_service.results import ExecutionResult, SampleReply, failure

SCORED: ExecutionResult = [SampleReply(reason=None, message="", score=1.0, components={})]
TIMEOUT = failure(InvalidReason.TIMEOUT, "too long")
DIED = failure(InvalidReason.WORKER_DIED, "exit code 3")


def test_requests_fill_one_worker_before_the_next() -> None:
    slots: WorkerSlots[str] = WorkerSlots(2)
    for name in ("a", "b"):
        slots.add(name)
    assert [slots.acquire() for _ in range(4)] == ["b", "b", "a", "a"]
    assert not slots.has_free


def test_worker_that_failed_comes_last() -> None:
    slots: WorkerSlots[str] = WorkerSlots(2)
    for name in ("a", "b"):
        slots.add(name)
    slots.release(slots.acquire(), failed=True)
    assert [slots.acquire() for _ in range(4)] == ["a", "a", "b", "b"]


class SlotsMachine(RuleBasedStateMachine):
    """Against a count of each worker's requests."""

    NUM_SLOTS = 3

    def __init__(self) -> None:
        super().__init__()
        self.slots: WorkerSlots[int] = WorkerSlots(self.NUM_SLOTS)
        self.running: dict[int, int] = {}
        self.withdrawn: set[int] = set()
        self.number = 0

    @property
    def free(self) -> set[int]:
        return {each for each, num in self.running.items() if num < self.NUM_SLOTS} - self.withdrawn

    @rule()
    def add(self) -> None:
        self.number += 1
        self.slots.add(self.number)
        self.running[self.number] = 0

    @precondition(lambda self: self.free)
    @rule()
    def acquire(self) -> None:
        worker = self.slots.acquire()
        assert worker in self.free, "a worker without a free slot got a request"
        self.running[worker] += 1

    @precondition(lambda self: any(self.running.values()))
    @rule(data=st.data(), failed=st.booleans(), has_problem=st.booleans())
    def release(self, data: st.DataObject, failed: bool, has_problem: bool) -> None:
        worker = data.draw(st.sampled_from([each for each, num in self.running.items() if num]))
        problem = "it left threads" if has_problem or worker in self.withdrawn else ""
        reason = self.slots.release(worker, failed=failed, problem=problem)
        assert reason == problem or not problem, "the first reason counts"
        self.running[worker] -= 1
        if reason:
            self.withdrawn.add(worker)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(list(self.running)))
        self.slots.remove(worker)
        del self.running[worker]
        self.withdrawn.discard(worker)

    @invariant()
    def knows_what_is_free(self) -> None:
        assert self.slots.has_free == bool(self.free)
        assert {worker: state.num_running for worker, state in self.slots.items()} == self.running


TestSlotsMachine = SlotsMachine.TestCase


def record(slots: WorkerSlots[str], worker: str, results: str) -> list[str]:
    """Record results of a worker, + or - each, and return the reasons to replace it."""
    if worker not in slots:
        slots.add(worker)
    reasons = []
    for result in results:
        slots[worker].num_running += 1
        reasons.append(slots.release(worker, failed=result == "-"))
    return [reason for reason in reasons if reason]


def test_worker_that_has_succeeded_is_replaced_after_three_failures_in_a_row() -> None:
    slots: WorkerSlots[str] = WorkerSlots()
    assert record(slots, "a", "++++++++++--+++++++++++++++++++++++++++++++--") == []
    assert record(slots, "a", "-") == ["3 failures in a row"]
    assert not slots.has_free, "the worker gets no further request"


def test_worker_that_breaks_at_its_start_is_replaced_while_others_succeed() -> None:
    slots: WorkerSlots[str] = WorkerSlots()
    reasons = []
    for _ in range(3):
        record(slots, "good", "+")
        reasons += record(slots, "broken", "-")
        record(slots, "good", "+")
    assert reasons == ["3 failures in a row"]


def test_function_that_fails_for_every_sample_costs_no_restart() -> None:
    slots: WorkerSlots[str] = WorkerSlots()
    assert [reason for worker in "abcd" for reason in record(slots, worker, "-" * 1000)] == []


def test_function_that_stops_working_restarts_each_worker_once() -> None:
    """Such as one whose service is down: new processes cannot help."""
    slots: WorkerSlots[str] = WorkerSlots()
    for worker in "abcd":
        record(slots, worker, "+" * 50)
    assert [record(slots, worker, "---") for worker in "abcd"] == [["3 failures in a row"]] * 4
    assert [reason for worker in "efgh" for reason in record(slots, worker, "-" * 1000)] == []


@pytest.mark.parametrize("share", [2, 3, 4])
def test_frequent_failures_are_normal_for_a_function(share: int) -> None:
    """The longest row among 3,000 results that fail at random would replace a worker hundreds of times."""
    slots: WorkerSlots[str] = WorkerSlots()
    num_replaced, state = 0, 1
    for _ in range(3000):
        state = state * 6364136223846793005 + 1442695040888963407 & (1 << 64) - 1
        if record(slots, str(num_replaced), "+" if (state >> 33) % share == 0 else "-"):
            num_replaced += 1
    assert num_replaced <= 30


def test_unfinished_row_of_a_spoilt_worker_does_not_excuse_it() -> None:
    slots: WorkerSlots[str] = WorkerSlots()
    record(slots, "good", "+" * 20)
    record(slots, "spoilt", "+")
    assert record(slots, "spoilt", "---") == ["3 failures in a row"]


def test_request_of_a_worker_that_has_a_problem_says_nothing_about_it() -> None:
    slots: WorkerSlots[str] = WorkerSlots()
    slots.add("a", max_requests=1)
    assert slots.release(slots.acquire(), failed=True, problem="it left threads") == "it left threads"
    assert slots["a"].num_requests == 0


def test_worker_is_replaced_after_max_requests() -> None:
    slots: WorkerSlots[str] = WorkerSlots()
    slots.add("a", max_requests=5)
    assert record(slots, "a", "+++++") == ["it served 5 requests (maxRequests)"]


def test_limits_of_requests_are_spread_below_the_field() -> None:
    limits = {draw_max_requests(1000) for _ in range(200)}
    assert len(limits) > 20
    assert 900 <= min(limits) <= max(limits) <= 1000
    assert draw_max_requests(1) == 1
    assert draw_max_requests(None) == float("inf")


@pytest.mark.parametrize(
    ("reasons", "failed"),
    [
        (["exception"], True),
        (["bad_return", "not_finite"], True),
        (["exception", None], False),
        (["abstained"], False),
        ([None], False),
    ],
)
def test_execution_fails_if_no_sample_has_a_usable_result(reasons: list[str | None], failed: bool) -> None:
    valid = SampleReply(score=1.0, components={}, reason=None, message="")
    replies = [valid if reason is None else failure(InvalidReason(reason), "")[0] for reason in reasons]
    assert has_failed(replies) is failed


def start(requests: RunningRequests, num: int) -> list[int]:
    return [requests.start(b"", 1, lambda result: None).number for _ in range(num)]


def test_request_that_must_end_keeps_its_reason_whatever_its_worker_answers() -> None:
    requests = RunningRequests()
    [number] = start(requests, 1)
    assert requests.must_end(number, TIMEOUT)
    assert not requests.must_end(number, DIED), "it must end already"
    assert requests.finish(number, SCORED)[1] == TIMEOUT


def test_cause_of_the_end_fails_and_the_others_are_interrupted() -> None:
    requests = RunningRequests()
    numbers = start(requests, 3)
    requests.must_end(numbers[2], TIMEOUT)
    reasons = [result[0].reason for _, result in requests.end_all(DIED, culprit=numbers[1])]
    assert reasons == ["interrupted", "worker_died", "timeout"]
    assert len(requests) == 0


def test_without_a_known_cause_all_fail() -> None:
    requests = RunningRequests()
    start(requests, 2)
    assert [result[0].reason for _, result in requests.end_all(DIED)] == ["worker_died"] * 2


def test_cause_that_has_ended_before_is_unknown() -> None:
    requests = RunningRequests()
    first, _ = start(requests, 2)
    requests.finish(first, SCORED)
    assert [result[0].reason for _, result in requests.end_all(DIED, culprit=first)] == ["worker_died"]


def test_second_answer_is_refused() -> None:
    requests = RunningRequests()
    [number] = start(requests, 1)
    requests.finish(number, SCORED)
    with pytest.raises(KeyError):
        requests.finish(number, SCORED)


class RunningMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.requests = RunningRequests()
        self.results: dict[int, list[ExecutionResult]] = {}
        self.ending: set[int] = set()

    def take(self, number: int, result: ExecutionResult) -> None:
        self.results[number].append(result)

    @rule()
    def start(self) -> None:
        number = len(self.results) + 1
        self.results[number] = []
        assert self.requests.start(b"", 1, partial(self.take, number)).number == number

    @rule(data=st.data())
    def end_one(self, data: st.DataObject) -> None:
        if self.requests:
            number = data.draw(st.sampled_from(list(self.requests)))
            self.requests.must_end(number, TIMEOUT)
            self.ending.add(number)

    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        if self.requests:
            callback, result = self.requests.finish(data.draw(st.sampled_from(list(self.requests))), SCORED)
            callback(result)

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        culprit = data.draw(st.sampled_from([0, *self.requests]))
        running = self.requests
        for callback, result in self.requests.end_all(DIED, culprit):
            callback(result)
        for number in {*running} - {culprit} - self.ending if culprit and len(running) > 1 else ():
            assert self.results[number][0][0].reason == "interrupted", "a neighbour failed for another request"

    @invariant()
    def has_one_result_each(self) -> None:
        for number, results in self.results.items():
            assert len(results) == (number not in self.requests)
            if number in self.ending and results:
                assert results[0] == TIMEOUT


TestRunningMachine = RunningMachine.TestCase
