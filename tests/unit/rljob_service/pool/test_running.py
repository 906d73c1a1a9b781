"""Each request of a worker gets exactly one result, and never one that another request caused."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rljob_api.wire.base import InvalidReason
from rljob_service.pool.running import RunningRequests
from rljob_service.results import ExecutionResult, SampleReply, failure

SCORED: ExecutionResult = [SampleReply(reason=None, message="", score=1.0, components={})]
TIMEOUT = failure(InvalidReason.TIMEOUT, "too long")
DIED = failure(InvalidReason.WORKER_DIED, "exit code 3")


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
