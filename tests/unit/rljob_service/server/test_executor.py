"""The executor with a pool of fake slots: timeouts, disconnected clients, joined requests."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from functools import partial

import pytest

from rljob_api.manifest.services.reward import Reward
from rljob_api.wire.base import InvalidReason
from rljob_api.wire.scores import ScoreRequest, ScoreResult
from rljob_service.kinds import KINDS
from rljob_service.results import ExecutionResult, SampleReply, StartupReport, failure
from rljob_service.server import executor as module
from rljob_service.server.executor import START_WINDOW_SECONDS, Executor, Pace, QueueFullError
from rljob_service.server.metrics import ServerMetrics
from rljob_service.server.served_service import ServedService
from rljob_service.slots import Callback, Kill
from rljob_service.worker.settings import FunctionSettings
from tests.support.waiting import DEADLINE_SECONDS

SETTINGS = FunctionSettings("", "function.inline", None, "auto", {}, 2048)


class FakeSlot:
    """Runs until a test ends its execution."""

    def __init__(self, pool: FakePool) -> None:
        self._pool = pool
        self._callback: Callback | None = None

    def start(self, callback: Callback) -> None:
        self._callback = callback
        self._pool.running.append(self)

    def kill(self, reason: InvalidReason, message: str) -> None:
        self.finish(failure(reason, message))

    def finish(self, result: ExecutionResult, computed_seconds: float | None = None) -> None:
        callback, self._callback = self._callback, None
        if callback is not None:
            self._pool.running.remove(self)
            self._pool.idle.append(self)
            callback(result, computed_seconds)
            self._pool.on_idle()


class FakePool:
    can_serve = True
    enforces_timeout = False
    notice = ""

    def __init__(self, size: int, on_idle: Callable[[], None]) -> None:
        self.idle = [FakeSlot(self) for _ in range(size)]
        self.running: list[FakeSlot] = []
        self.on_idle = on_idle

    @property
    def has_idle(self) -> bool:
        return bool(self.idle)

    async def start_first(self) -> StartupReport:
        return StartupReport()

    def start(self, body: bytes, num_samples: int, callback: Callback) -> Kill:
        slot = self.idle.pop()
        slot.start(callback)
        return slot.kill

    def ensure(self, demand: int) -> None: ...

    async def close(self) -> None:
        for slot in list(self.running):
            slot.kill(InvalidReason.CANCELLED, "the server shut down")


class Client:
    def __init__(self) -> None:
        self.result: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._has_left = False
        self._on_left: Callable[[], None] | None = None

    def deliver(self, result: bytes) -> None:
        self.result.set_result(result)

    def is_disconnected(self) -> bool:
        return self._has_left

    def call_when_left(self, callback: Callable[[], None]) -> None:
        self._on_left = callback

    def leave(self) -> None:
        self._has_left = True
        assert self._on_left is not None
        self._on_left()

    async def wait(self) -> ScoreResult:
        async with asyncio.timeout(DEADLINE_SECONDS):
            return ScoreResult.model_validate_json(await self.result)


@pytest.fixture
def build_executor(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Executor]:
    def build(slots: int = 1, queue_length: int = 9, timeout_seconds: float = 30.0, per_process: int = 1) -> Executor:
        places = slots * per_process
        monkeypatch.setattr(
            module, "build_pool", lambda service, metrics, *, on_idle, on_fatal_error: FakePool(places, on_idle)
        )
        function = {"inline": "def reward(prompts, completions): ..."}
        config = Reward(name="test", slots=slots, queue_length=queue_length, function=function)
        config.timeout_seconds = timeout_seconds  # type: ignore[assignment]
        settings = SETTINGS._replace(per_process=per_process)
        return Executor(ServedService(KINDS["score"], config, settings, "1"), ServerMetrics("test", slots))

    return build


def submit(executor: Executor, name: str, client: Client | None = None) -> Client:
    client = client or Client()
    request = ScoreRequest(id=name, prompt="p", completion="c")
    executor.submit(request, request.model_dump_json().encode(), client)
    return client


def running(executor: Executor) -> list[FakeSlot]:
    assert isinstance(executor.pool, FakePool)
    return executor.pool.running


VALID = [SampleReply(score=1.0, components={}, reason=None, message="")]


async def test_late_execution_is_killed_and_a_finished_one_is_not(build_executor: Callable[..., Executor]) -> None:
    executor = build_executor(timeout_seconds=0.05)
    late = submit(executor, "late")
    assert (await late.wait()).reason is InvalidReason.TIMEOUT
    in_time = submit(executor, "in time")
    running(executor)[0].finish(VALID)
    following = submit(executor, "following")
    assert (await in_time.wait()).valid
    result = await following.wait()
    assert result.reason is InvalidReason.TIMEOUT
    assert result.execute_seconds >= 0.04, "killed by its own timer, not by that of the execution before"


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
async def test_training_never_has_more_than_slots_in_shared_processes(
    build_executor: Callable[..., Executor], slots: int
) -> None:
    executor = build_executor(slots=slots, per_process=4)
    executor._pace.limit = math.inf  # long ones start at once
    for number in range(slots + 2):
        submit(executor, str(number))
    assert len(running(executor)) == slots


async def test_each_late_execution_is_killed_at_its_own_time(build_executor: Callable[..., Executor]) -> None:
    executor = build_executor(slots=2, timeout_seconds=0.1)
    first, second = submit(executor, "first"), submit(executor, "second")
    _, later = executor._lanes.running_oldest_first()
    assert later.started is not None
    later.started += 0.05
    for client in (first, second):
        result = await client.wait()
        assert result.reason is InvalidReason.TIMEOUT
        assert result.execute_seconds >= 0.1


async def test_request_of_a_disconnected_client_never_starts(build_executor: Callable[..., Executor]) -> None:
    executor = build_executor()
    submit(executor, "a")
    client = submit(executor, "b")
    client.leave()
    assert (await client.wait()).reason is InvalidReason.CANCELLED
    last = submit(executor, "c")
    running(executor)[0].finish(VALID)
    running(executor)[0].finish(VALID)
    assert (await last.wait()).valid
    await asyncio.wait_for(executor.drained(), DEADLINE_SECONDS)


async def test_retry_joins_the_pending_request_and_later_gets_its_response(
    build_executor: Callable[..., Executor],
) -> None:
    executor = build_executor(slots=2)
    first, second = submit(executor, "a"), submit(executor, "a")
    assert len(running(executor)) == 1
    running(executor)[0].finish(VALID)
    third = submit(executor, "a")
    assert await first.result == await second.result == await third.result


async def test_closing_cancels_waiting_and_running_requests(build_executor: Callable[..., Executor]) -> None:
    executor = build_executor()
    clients = [submit(executor, name) for name in "ab"]
    await executor.close()
    assert {(await client.wait()).reason for client in clients} == {InvalidReason.CANCELLED}


async def test_full_queue_has_room_again_when_a_client_leaves_it(build_executor: Callable[..., Executor]) -> None:
    executor = build_executor(queue_length=1)
    submit(executor, "a")
    queued = submit(executor, "b")
    with pytest.raises(QueueFullError):
        submit(executor, "c")
    queued.leave()
    submit(executor, "c")


async def test_execution_that_no_client_waits_for_frees_its_slot(
    build_executor: Callable[..., Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ABANDONED_SECONDS", 0.01)
    executor = build_executor()
    client, following = submit(executor, "a"), submit(executor, "b")
    client.leave()
    result = await client.wait()
    assert (result.reason, result.message) == (InvalidReason.CANCELLED, "the client left while it was executed")
    running(executor)[0].finish(VALID)
    assert (await following.wait()).valid, "the next one got the slot"


async def test_execution_continues_when_a_retry_joins_it_in_time(
    build_executor: Callable[..., Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ABANDONED_SECONDS", 0.01)
    executor = build_executor(slots=2)
    client, other = submit(executor, "a"), submit(executor, "b")
    client.leave()
    retry = submit(executor, "a")
    other.leave()  # its execution is killed after the time of the first one
    assert (await other.wait()).reason is InvalidReason.CANCELLED
    [slot] = running(executor)
    slot.finish(VALID)
    assert (await retry.wait()).valid


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the executor and its executions read."""
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    return now


async def test_result_has_the_seconds_in_the_queue_and_in_the_slot(
    build_executor: Callable[..., Executor], clock: list[float]
) -> None:
    executor = build_executor()
    submit(executor, "first")
    second = submit(executor, "second")
    clock[0] += 3.0
    running(executor)[0].finish(VALID)
    clock[0] += 5.0
    running(executor)[0].finish(VALID)
    result = await second.wait()
    assert (result.queue_seconds, result.execute_seconds) == (3.0, 5.0)


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, 1), (40.0, 4), (4000.0, 60)])
async def test_retry_after_is_the_time_to_work_off_the_queue(
    build_executor: Callable[..., Executor], clock: list[float], seconds: float, expected: int
) -> None:
    executor = build_executor(slots=2, queue_length=4)
    submit(executor, "first")
    clock[0] += seconds
    running(executor)[0].finish(VALID)  # the moving mean becomes a twentieth of it
    for number in range(6):  # two run, four wait
        submit(executor, str(number))
        clock[0] += 1000  # starts are spread over a window
    with pytest.raises(QueueFullError) as refused:
        submit(executor, "too many")
    assert refused.value.retry_after_seconds == expected


async def test_drained_waits_for_what_runs_and_waits(build_executor: Callable[..., Executor]) -> None:
    executor = build_executor()
    submit(executor, "a")
    submit(executor, "b")
    drained = asyncio.create_task(executor.drained())
    for _ in range(2):
        await asyncio.sleep(0)
        assert not drained.done()
        running(executor)[0].finish(VALID)
    await asyncio.wait_for(drained, DEADLINE_SECONDS)


def count_starts(mean_seconds, now, started=(), num_processors=2, computed=()):
    """How many more may start at once, of at most 100; `started` are earlier start times, the newest first. `computed`:
    what executions have reported."""
    pace, newest_first = Pace(num_processors), list(started)
    pace.mean_seconds = mean_seconds
    for seconds in computed or [None]:
        pace.record(mean_seconds, seconds)
    for count in range(100):
        if not pace.may_start(newest_first, now):
            return count
        newest_first.insert(0, now)
    return 100


def test_short_executions_start_one_per_processor():
    assert count_starts(0.0001, 1.0, num_processors=4) == 4
    assert count_starts(0.0001, 1.0, started=[1.0] * 3, num_processors=4) == 1, "one for each that ended"


def test_executions_older_than_the_window_do_not_count():
    earlier = [1.0] * 2
    assert count_starts(0.0001, 1.0 + START_WINDOW_SECONDS / 2, earlier) == 0
    assert count_starts(0.0001, 1.0 + START_WINDOW_SECONDS, earlier) == 2, "for any mean"


def test_long_executions_all_start_at_once():
    assert count_starts(1.0, 1.0) == 100


def test_executions_that_only_compute_start_one_per_processor_however_long_they_take():
    assert count_starts(8.0, 9.0, computed=[1.0] * 20) == 2, "on a busy machine they take longer than they compute"
    assert count_starts(8.0, 9.0, computed=[1.0] * 19) == 100, "too few to know"
    assert count_starts(8.0, 9.0, computed=[1.0] * 20 + [None]) == 100, "one has waited"
    assert count_starts(8.0, 9.0, started=[1.2, 1.1], computed=[1.0] * 20) == 0
    assert count_starts(8.0, 9.3, started=[1.2, 1.1], computed=[1.0] * 20) == 2, "what runs for that long may wait"


async def test_function_that_only_computes_gets_a_slot_per_processor(
    build_executor: Callable[..., Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "Pace", partial(Pace, 2))
    executor = build_executor(slots=3)
    executor._pace.mean_seconds = 1.0  # of a busy machine
    for number in range(20):
        submit(executor, f"first {number}")
        running(executor)[0].finish(VALID, 100.0)
    clients = [submit(executor, str(number)) for number in range(3)]
    assert len(running(executor)) == 2
    running(executor)[0].finish(VALID, 100.0)
    assert (await clients[0].wait()).valid
    assert len(running(executor)) == 2, "the third one follows"
    running(executor)[0].finish(VALID)
    assert len(running(executor)) == 1
    for number in range(2):
        submit(executor, f"last {number}")
    assert len(running(executor)) == 3, "one of them waited, and so may the others"


@pytest.mark.parametrize(
    ("text", "most"), [("150000 100000", 2), ("50000 100000", 1), ("max 100000", 999), (None, 999)]
)
def test_a_limit_of_cpu_time_bounds_the_processors(tmp_path, monkeypatch, text, most):
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: range(999))
    if text is not None:
        (tmp_path / "cpu.max").write_text(text)
    assert module.count_processors(tmp_path / "cpu.max") == most
