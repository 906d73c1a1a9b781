"""Waiting for a replica."""

import asyncio
import threading

import pytest

from rljob_api.errors import TransientError
from rljob_trainer.replicas.pool import ReplicaPool


@pytest.fixture
async def started():
    running = []

    async def start(addresses, **settings):
        replicas = ReplicaPool("rollouts", lambda: list(addresses), **settings)
        await replicas.start()
        running.append(replicas)
        return replicas

    async with asyncio.timeout(20):
        yield start
    for replicas in running:
        await replicas.close()


async def test_those_who_wait_are_served_in_their_order(started):
    replicas = await started(["a"], max_in_flight=1)
    served = []

    async def ask(number):
        async with replicas.lease() as lease:
            served.append(number)
            await asyncio.sleep(0)
            lease.done()

    await asyncio.gather(*[ask(number) for number in range(50)])
    assert served == list(range(50))


async def test_a_replica_that_appears_serves_those_who_wait(started):
    addresses = []
    replicas = await started(addresses)
    waiting = asyncio.create_task(replicas.lease().__aenter__())
    await asyncio.sleep(0)
    assert replicas.num_waiting == 1
    addresses.append("a")
    assert (await waiting).address == "a"


async def test_a_waiter_that_leaves_takes_nothing_with_it(started):
    replicas = await started(["a"], max_in_flight=1)
    async with replicas.lease() as lease:
        waiting = asyncio.create_task(replicas.lease().__aenter__())
        await asyncio.sleep(0)
        lease.done()  # serves the waiter, who is cancelled in that moment
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert replicas.fleet.replicas["a"].in_flight == 0
    async with replicas.lease() as lease:
        assert lease.address == "a"


async def test_nobody_waits_for_ever(started):
    replicas = await started([], unavailable_timeout_seconds=0.3)
    with pytest.raises(TransientError, match="rollouts: no replica has answered for 0 s"):
        await replicas.lease().__aenter__()


async def test_a_lease_that_says_nothing_changes_nothing_but_the_load(started):
    replicas = await started(["a"])
    with pytest.raises(KeyError):
        async with replicas.lease():
            raise KeyError
    assert replicas.fleet.replicas["a"].in_flight == 0
    assert replicas.fleet.replicas["a"].num_failures == 0


async def test_discovery_that_fails_keeps_what_is_known(started):
    answers = [["a"]]

    def discover():
        if answers:
            return answers.pop()
        raise OSError("no DNS now")

    replicas = ReplicaPool("rollouts", discover)
    await replicas.start()
    try:
        async with replicas.lease() as lease:
            assert lease.address == "a"
            lease.done()
        await replicas._observe()
        async with replicas.lease() as lease:
            assert lease.address == "a"
    finally:
        await replicas.close()


async def test_a_name_server_that_does_not_answer_holds_up_nobody():
    """A resolver may take half a minute to give up; who waits for a replica with a short pause waits for that alone."""
    is_slow, is_asked, gives_up = threading.Event(), threading.Event(), threading.Event()

    def discover():
        if is_slow.is_set():
            is_asked.set()
            gives_up.wait(60)
        return ["a"]

    replicas = ReplicaPool("rewards", discover)
    await replicas.start()
    try:
        async with asyncio.timeout(20):
            async with replicas.lease() as lease:
                is_slow.set()
                await asyncio.to_thread(is_asked.wait)
                lease.busy(0.1)
            async with replicas.lease() as lease:
                assert lease.address == "a"
    finally:
        gives_up.set()
        await replicas.close()


async def test_where_there_may_be_no_replica_at_all_waiting_for_the_first_is_no_error(started):
    addresses = []
    replicas = await started(addresses, allow_empty=True, unavailable_timeout_seconds=0.0)
    waiting = asyncio.create_task(replicas.lease().__aenter__())
    for _ in range(20):
        replicas.fail_expired_waiters(True)
        await asyncio.sleep(0)
    assert not waiting.done()
    addresses.append("a")
    assert (await waiting).address == "a"


async def test_replicas_that_are_there_and_fail_still_run_out_of_patience(started):
    replicas = await started(["a"], allow_empty=True, unavailable_timeout_seconds=0.0)

    async def ask_for_ever():
        while True:
            async with replicas.lease() as lease:
                lease.failed("refused")

    with pytest.raises(TransientError, match="no replica has answered"):
        await ask_for_ever()


async def test_a_failure_before_a_long_pause_takes_no_patience_from_those_who_come_after_it():
    """A new replica's first probe failed between two steps; nobody has asked for anything since."""
    now = 100.0
    replicas = ReplicaPool("rewards", list, max_in_flight=1, unavailable_timeout_seconds=600.0, clock=lambda: now)
    replicas.fleet.observe_addresses(["a", "b"])
    replicas.fleet.record_suspect("b", now)
    replicas.fail_expired_waiters(False)
    now = 1000.0
    replicas.fail_expired_waiters(False)
    async with asyncio.timeout(20), replicas.lease(), replicas.lease():
        waiting = asyncio.create_task(replicas.lease().__aenter__())
        await asyncio.sleep(0)
        replicas.fail_expired_waiters(True)
        assert not waiting.done(), "both replicas are at work, and nothing has failed for long"
    await waiting


async def test_a_place_that_appears_is_spare_only_when_nobody_waits_for_it():
    replicas = ReplicaPool("rewards", list, max_in_flight=1)  # not started: no tick comes between
    replicas.fleet.observe_addresses(["a"])
    async with replicas.lease() as first:
        waiting = asyncio.create_task(replicas.lease().__aenter__())
        await asyncio.sleep(0)
        replicas.fleet.observe_addresses(["a", "b"])
        assert replicas.try_lease({first.address}) is None
        replicas.dispatch()
        (await waiting).done()
        spare = replicas.try_lease({first.address})
        assert spare.address == "b"
        spare.unused()
        assert replicas.try_lease({"a", "b"}) is None, "never the one that has it already"
