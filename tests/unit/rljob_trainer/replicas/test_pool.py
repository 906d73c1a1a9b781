"""Waiting for a replica."""

import asyncio
import threading

import pytest

from rljob_trainer.outages import OutageError, Outages
from rljob_trainer.replicas import pool
from rljob_trainer.replicas.fleet import Affinity
from rljob_trainer.replicas.pool import ReplicaPool
from tests.support.waiting import DEADLINE_SECONDS


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch):
    monkeypatch.setattr(pool, "_DISCOVERY_SECONDS", 0.05)
    monkeypatch.setattr(pool, "_TICK_SECONDS", 0.02)


@pytest.fixture
async def started():
    running = []

    async def start(addresses, **settings):
        replicas = ReplicaPool("rollouts", lambda: list(addresses), **settings)
        await replicas.start()
        running.append(replicas)
        return replicas

    async with asyncio.timeout(DEADLINE_SECONDS):
        yield start
    for replicas in running:
        await replicas.close()


async def test_waiters_are_served_in_order_of_arrival(started):
    replicas = await started(["a"], max_in_flight=1)
    served = []

    async def use(number):
        async with replicas.lease() as lease:
            served.append(number)
            await asyncio.sleep(0)
            lease.done()

    await asyncio.gather(*[use(number) for number in range(50)])
    assert served == list(range(50))


async def test_waiter_is_served_as_if_it_had_waited_since_the_given_time(started):
    replicas = await started(["a"], max_in_flight=1)
    served, first = [], replicas.now()

    async def use(name, since):
        async with replicas.lease(since=since) as lease:
            served.append(name)
            await asyncio.sleep(0)
            lease.done()

    waits = [("later", None), ("group", first), ("older group", first - 1), ("same group", first)]
    await asyncio.gather(*[use(name, since) for name, since in waits])
    assert served == ["older group", "group", "same group", "later"]


@pytest.mark.parametrize(("later", "first"), [(4.0, "with prefix"), (6.0, "older")])
async def test_free_place_goes_to_the_waiter_with_its_prefix_if_no_other_is_older(started, later, first):
    replicas = await started(["a", "b"], max_in_flight=1)
    served, now = [], replicas.now()

    async def use(name, since, address):
        async with replicas.lease(since=since, affinity=Affinity(address=address)) as lease:
            served.append((name, lease.address))

    async with replicas.lease() as at_a, replicas.lease() as at_b:
        waiting = [
            asyncio.create_task(use(name, since, address))
            for name, since, address in [("older", now, at_b.address), ("with prefix", now + later, at_a.address)]
        ]
        await asyncio.sleep(0)
        at_a.done()
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert served[0] == (first, at_a.address)
    await asyncio.gather(*waiting)


async def test_new_replica_serves_waiters(started):
    addresses = []
    replicas = await started(addresses)
    waiting = asyncio.create_task(replicas.lease().__aenter__())
    await asyncio.sleep(0)
    assert replicas.num_waiting == 1
    addresses.append("a")
    assert (await waiting).address == "a"


async def test_waiter_cancelled_while_being_served_releases_the_replica(started):
    replicas = await started(["a"], max_in_flight=1)
    async with replicas.lease() as lease:
        waiting = asyncio.create_task(replicas.lease().__aenter__())
        await asyncio.sleep(0)
        lease.done()  # dispatches to the waiter, which is cancelled before it runs
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert replicas.fleet.replicas["a"].in_flight == 0
    async with replicas.lease() as lease:
        assert lease.address == "a"


async def test_waiters_fail_after_the_time_that_a_job_waits_for_an_outage(started):
    replicas = await started([], health=Outages(0.1).watch("spec.rollout (rollouts)"))
    with pytest.raises(OutageError, match=r"away since .* last error: no replica exists"):
        await replicas.lease().__aenter__()


async def test_lease_without_outcome_only_releases_its_place(started):
    replicas = await started(["a"])
    with pytest.raises(KeyError):
        async with replicas.lease():
            raise KeyError
    assert replicas.fleet.replicas["a"].in_flight == 0
    assert replicas.fleet.replicas["a"].num_failures == 0


async def test_failed_discovery_keeps_known_replicas(started):
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


async def test_hanging_name_server_blocks_no_waiter():
    """A resolver can take half a minute to fail; the pause of a busy replica is much shorter."""
    is_slow, is_called, gives_up = threading.Event(), threading.Event(), threading.Event()

    def discover():
        if is_slow.is_set():
            is_called.set()
            gives_up.wait(60)
        return ["a"]

    replicas = ReplicaPool("rewards", discover)
    await replicas.start()
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            async with replicas.lease() as lease:
                is_slow.set()
                await asyncio.to_thread(is_called.wait)
                lease.busy(0.1)
            async with replicas.lease() as lease:
                assert lease.address == "a"
    finally:
        gives_up.set()
        await replicas.close()


async def test_failing_replicas_end_the_job_though_they_come_back_to_the_list(started):
    replicas = await started(["a"], health=Outages(0.1).watch("r"))

    async def retry_forever():
        while True:
            async with replicas.lease() as lease:
                lease.failed("connection refused")

    with pytest.raises(OutageError, match=r"last error: a: connection refused"):
        await retry_forever()


async def test_outage_starts_again_after_an_idle_period():
    """A new replica's first probe failed between two steps; there were no requests since."""
    now = 100.0
    health = Outages(600.0, lambda: now).watch("r")
    replicas = ReplicaPool("rewards", list, max_in_flight=1, health=health, clock=lambda: now)
    replicas.fleet.observe_addresses(["a", "b"])
    replicas.fleet.record_suspect("b", now)
    replicas.fail_expired_waiters()
    now = 1000.0
    replicas.fail_expired_waiters()
    async with asyncio.timeout(DEADLINE_SECONDS), replicas.lease(), replicas.lease():
        waiting = asyncio.create_task(replicas.lease().__aenter__())
        await asyncio.sleep(0)
        replicas.fail_expired_waiters()
        assert not waiting.done(), "both replicas are busy, and the failure is not recent"
    await waiting


async def test_try_lease_takes_no_place_from_a_waiter():
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
        assert replicas.try_lease({"a", "b"}) is None, "never a replica to avoid"
