"""When drivers are requested, who waits for them, and who is reconciled when an answer comes later."""

import asyncio

import pytest

from rljob_api.wire.driver_status import DriverStatus
from rljob_core.backend import DRIVER_SILENT, DRIVER_UNREADABLE, DriverAnswer, JobKey, RewardModelKey
from rljob_operator.kube import driver
from rljob_operator.kube.driver import DriverClient, DriverEndpoint
from rljob_operator.kube.driver_request import UnreadableAnswerError

NUM_HEALTHY, NUM_HUNG = 20, 60
KEY = JobKey("ns", "job")


class Drivers:
    """Answers of drivers by the uid of their Pods, without HTTP: a status, an error, or a future that is not done."""

    def __init__(self, monkeypatch):
        self.answers, self.requests, self.changed, self.now = {}, [], [], 0.0
        self.client = DriverClient(clock=lambda: self.now, on_change=self.changed.append)
        monkeypatch.setattr(driver, "request_status", self._request)
        monkeypatch.setattr(driver, "PATIENCE_SECONDS", 0.01)

    async def _request(self, session, endpoint, port):
        self.requests.append((self.now, endpoint.pod_uid))
        answer = self.answers[endpoint.pod_uid]
        if isinstance(answer, asyncio.Future):
            answer = await asyncio.shield(answer)
        if isinstance(answer, Exception):
            raise answer
        await asyncio.sleep(0)
        return answer

    async def get(self, uid="uid", key=KEY, max_age_seconds=10.0):
        return await self.client.get_status(DriverEndpoint(uid, "10.0.0.1", "t"), key, max_age_seconds)

    async def finish(self):
        """Wait for the requests in the background."""
        await asyncio.gather(*self.client._requests)

    async def poll(self, times):
        """Return the answers that are known after a poll at each time."""
        answers = []
        for self.now in map(float, times):
            await self.get()
            await self.finish()
            answers.append(self.client._drivers["uid"].answer)
        return answers

    def times_of(self, uid):
        return [time for time, requested in self.requests if requested == uid]


@pytest.fixture
async def drivers(monkeypatch):
    created = Drivers(monkeypatch)
    yield created
    await created.client.close()


async def test_driver_is_requested_again_only_when_its_answer_is_too_old(drivers):
    drivers.answers["uid"] = DriverStatus(step=1)
    for drivers.now, age in ((0.0, 10.0), (2.0, 10.0), (2.0, 2.0), (3.0, 2.0), (9.0, 10.0), (9.0, 2.0)):
        assert await drivers.get(max_age_seconds=age) == DriverAnswer(DriverStatus(step=1))
    assert drivers.times_of("uid") == [0.0, 2.0, 9.0]
    assert not drivers.changed, "each reconcile got the new answer"


async def test_late_answer_requeues_who_did_not_wait_for_it(drivers):
    drivers.answers["uid"] = late = asyncio.get_running_loop().create_future()
    model = RewardModelKey("ns", "math")
    assert await drivers.get() == await drivers.get(key=model) == DriverAnswer()
    assert len(drivers.requests) == 1, "one request at a time"
    late.set_result(DriverStatus(step=5))
    await drivers.finish()
    assert set(drivers.changed) == {KEY, model}
    assert await drivers.get() == DriverAnswer(DriverStatus(step=5))


async def test_unchanged_late_answer_requeues_nothing(drivers):
    drivers.answers["uid"] = DriverStatus(step=5)
    await drivers.get()
    drivers.now, drivers.answers["uid"] = 10.0, asyncio.get_running_loop().create_future()
    await drivers.get()
    drivers.answers["uid"].set_result(DriverStatus(step=5))
    await drivers.finish()
    assert not drivers.changed


async def test_unreadable_answer_says_why_and_is_requested_as_often(drivers):
    drivers.answers["uid"] = UnreadableAnswerError("it is larger than 64 KiB")
    for drivers.now in (0.0, 10.0):
        assert await drivers.get() == DriverAnswer(problem=f"{DRIVER_UNREADABLE}: it is larger than 64 KiB")
    assert drivers.times_of("uid") == [0.0, 10.0]


async def test_driver_that_never_answers_in_time_is_requested_rarely_and_reported(drivers):
    drivers.answers["uid"] = TimeoutError()
    answers = await drivers.poll(range(0, 300, 10))
    assert drivers.times_of("uid") == [0.0, 20.0, 60.0, 120.0, 180.0, 240.0]
    assert answers[:6] == [DriverAnswer()] * 6, "it may be busy"
    assert answers[-1].problem == f"{DRIVER_UNREADABLE}: it is not complete after 2 s"
    drivers.changed.clear()
    drivers.now, drivers.answers["uid"] = 295.0, DriverStatus(step=1)
    await drivers.get()
    await drivers.finish()
    assert drivers.changed == [KEY], "no reconcile waits for it"
    assert await drivers.get() == DriverAnswer(DriverStatus(step=1))


async def test_driver_that_refuses_connections_is_silent_from_the_third_poll_on(drivers):
    drivers.answers["uid"] = ConnectionRefusedError("connect call failed\x1b")
    silent = DriverAnswer(problem=f"{DRIVER_SILENT}: connect call failed")
    assert await drivers.poll((0, 10, 20, 30)) == [DriverAnswer(), DriverAnswer(), silent, silent]
    assert drivers.times_of("uid") == [0.0, 10.0, 20.0, 30.0], "it may start at any time"
    drivers.answers["uid"] = DriverStatus(step=1)
    assert await drivers.poll((40,)) == [DriverAnswer(DriverStatus(step=1))]
    drivers.answers["uid"] = ConnectionResetError()
    assert await drivers.poll((50, 60)) == [DriverAnswer()] * 2


async def test_hung_drivers_delay_no_healthy_one(drivers):
    """All keys are polled by eight workers, as the operator does: each healthy driver is requested at every poll."""
    healthy = [f"healthy-{index}" for index in range(NUM_HEALTHY)]
    hung = [f"hung-{index}" for index in range(NUM_HUNG)]
    drivers.answers |= {uid: DriverStatus() for uid in healthy}
    for drivers.now in map(float, range(0, 60, 10)):
        drivers.answers |= {uid: asyncio.get_running_loop().create_future() for uid in hung}
        waiting = [*hung, *healthy]

        async def work(keys=waiting):
            while keys:
                uid = keys.pop(0)
                await drivers.get(uid, JobKey("ns", uid))

        await asyncio.gather(*(work() for _ in range(8)))
        for uid in hung:
            drivers.answers[uid].set_exception(TimeoutError())
            drivers.answers[uid].exception()  # not all were requested
        await drivers.finish()
    assert {len(drivers.times_of(uid)) for uid in healthy} == {6}, "every 10 s"
    assert {len(drivers.times_of(uid)) for uid in hung} == {2}


async def test_workers_remain_while_drivers_are_slow(drivers, monkeypatch):
    monkeypatch.setattr(driver, "PATIENCE_SECONDS", 3600.0)
    never = asyncio.get_running_loop().create_future()
    drivers.answers |= {f"slow-{index}": never for index in range(driver._MAX_WAITING)} | {"next": never}
    waiting = [asyncio.create_task(drivers.get(f"slow-{i}", JobKey("ns", f"{i}"))) for i in range(driver._MAX_WAITING)]
    await asyncio.sleep(0)
    assert await drivers.get("next") == DriverAnswer()
    never.set_result(DriverStatus(step=1))
    assert await asyncio.gather(*waiting) == [DriverAnswer(DriverStatus(step=1))] * driver._MAX_WAITING
