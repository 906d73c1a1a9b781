"""How the requests of a shared process end: alone where they can, else with the process and its cause named."""

from __future__ import annotations

import json

import pytest

from rljob_api.wire.base import InvalidReason
from rljob_service.pool.shared_requests import BLOCKED_SECONDS, LoopWatch, SharedRequests
from rljob_service.pool.worker_slots import RunningRequests
from rljob_service.results import failure
from rljob_service.worker.process.frames import CANCEL
from rljob_service.worker.settings import EPISODES, FunctionSettings

TIMEOUT = failure(InvalidReason.TIMEOUT, "too long")


class FakeWorker:
    def __init__(self) -> None:
        self.settings = FunctionSettings("", "agent.py", None, "auto", {}, 1 << 30, serves=EPISODES, per_process=4)
        self.requests = RunningRequests()
        self.sent: list[tuple[bytes, int]] = []
        self.kills: list[tuple[int, str]] = []
        self.now = 100.0
        self.shared = SharedRequests(self, lambda: self.now)

    def start(self, name: str) -> int:
        if not self.requests:
            self.shared.start_watch()
        return self.requests.start(json.dumps({"id": name}).encode(), 1, lambda result: None).number

    def turn_loop(self) -> None:
        for _ in range(4):
            self.shared.board.beat()

    def send(self, payload: bytes, number: int) -> None:
        self.sent.append((payload, number))

    def kill_for(self, culprit: int, message: str) -> None:
        self.kills.append((culprit, message))

    async def locate(self) -> str:
        return "agent.py:12"


@pytest.fixture
async def worker() -> FakeWorker:
    return FakeWorker()


async def test_request_that_must_end_is_cancelled_once(worker: FakeWorker) -> None:
    first, _ = worker.start("a"), worker.start("b")
    worker.shared.end(first, TIMEOUT)
    worker.shared.end(first, TIMEOUT)
    assert (worker.sent, worker.kills) == ([(CANCEL, first)], [])


async def test_request_that_goes_on_after_its_cancellation_costs_the_process(worker: FakeWorker) -> None:
    first, _ = worker.start("a"), worker.start("b")
    worker.shared.end(first, TIMEOUT)
    worker.turn_loop()
    worker.shared._check_ended(first, beats=0)
    [(culprit, message)] = worker.kills
    assert culprit == first
    assert "request a: it ran on for 5 s after it was cancelled" in message


async def test_request_that_could_not_end_while_another_one_ran_costs_nothing(worker: FakeWorker) -> None:
    cancelled, running = worker.start("a"), worker.start("b")
    worker.shared.end(cancelled, TIMEOUT)
    worker.shared.board.current = running  # for a second or two, as an import takes
    worker.shared._check_ended(cancelled, beats=0)
    assert worker.kills == []
    worker.shared.board.current = cancelled
    worker.shared._check_ended(cancelled, beats=0)
    assert [culprit for culprit, _ in worker.kills] == [cancelled], "it blocks the loop itself"


async def test_late_neighbour_of_a_request_that_blocks_has_not_timed_out(worker: FakeWorker) -> None:
    blocking, late = worker.start("a"), worker.start("b")
    worker.shared.board.beat()
    worker.shared.is_blocked()  # the pool looks
    worker.shared.board.current = blocking
    worker.now += 3
    worker.shared.end(late, TIMEOUT)
    request = worker.requests.get(late)
    assert request is not None
    assert request.ends_as is None, "its lateness is the other one's"
    assert [culprit for culprit, _ in worker.kills] == [blocking]


async def test_loop_that_does_not_turn_is_blocked_by_the_request_that_runs(worker: FakeWorker) -> None:
    blocking, _ = worker.start("a"), worker.start("b")
    worker.shared.board.current = blocking
    worker.shared.is_blocked()
    worker.now += BLOCKED_SECONDS + 1
    assert worker.shared.is_blocked()
    await worker.shared.end_blocked()
    assert not worker.shared.is_blocked(), "it is killed once"
    [(culprit, message)] = worker.kills
    assert culprit == blocking
    assert "request a: it blocked the event loop of its process for 10 s at agent.py:12" in message


async def test_process_that_ends_waits_for_all_requests(worker: FakeWorker) -> None:
    first, second = worker.start("a"), worker.start("b")
    worker.shared.end_all(failure(InvalidReason.CANCELLED, "the server shut down"))
    assert worker.sent == [(CANCEL, first), (CANCEL, second)]
    assert [worker.shared.count_answer(number) for number in (first, second)] == [False, True]


def test_loop_that_beats_turns() -> None:
    watch = LoopWatch()
    watch.start(0.0)
    assert [watch.observe(beats, float(beats)) for beats in range(1, 30)] == [0.0] * 29


def test_loop_without_a_beat_is_late_for_as_long() -> None:
    watch = LoopWatch()
    watch.start(100.0)
    watch.observe(5, 101.0)
    assert watch.observe(5, 109.0) == 8.0
    assert watch.is_late(5, 109.0)
    assert not watch.is_late(6, 109.5)


def test_loop_without_requests_is_never_late() -> None:
    watch = LoopWatch()
    watch.start(0.0)
    watch.observe(5, 1.0)
    watch.stop()
    assert watch.observe(5, 1000.0) == 0.0
    watch.start(2000.0)
    assert watch.observe(5, 2001.0) == 1.0, "its last beat was before it had no requests"
