from __future__ import annotations

import asyncio

import pytest

from rljob_api.wire.contract import ENV_PEERS, ENV_POD_IP
from rljob_service.models import chat
from rljob_service.models.chat import ReplicaCounter
from tests.support.waiting import DEADLINE_SECONDS


@pytest.fixture
def lookups(monkeypatch):
    """Results of the next lookups: addresses, or an error. The last one is repeated."""
    monkeypatch.setenv(ENV_PEERS, "judges")
    monkeypatch.setenv(ENV_POD_IP, "10.0.0.1")
    monkeypatch.setattr(chat, "_POLL_SECONDS", 0.01)
    results: list[list[str] | Exception] = []

    def resolve(host: str) -> list[str]:
        result = results.pop(0) if len(results) > 1 else results[0]
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(chat, "resolve", resolve)
    return results


async def count(until: int) -> list[int]:
    """Return the reported counts up to the first `until`."""
    counts: list[int] = []
    reached = asyncio.Event()

    def report(number: int) -> None:
        counts.append(number)
        if number == until:
            reached.set()

    counter = ReplicaCounter(7, report)
    await counter.start()
    async with asyncio.timeout(DEADLINE_SECONDS):
        await reached.wait()
    counter.close()
    return counts


async def test_start_counts_ready_replicas_and_itself(lookups):
    lookups[:] = [["10.0.0.2", "10.0.0.3"]]
    assert await count(3) == [7, 3]


async def test_count_follows_scale_up_and_scale_down(lookups):
    lookups[:] = [["10.0.0.1"], ["10.0.0.1", "10.0.0.2", "10.0.0.4"], ["10.0.0.1", "10.0.0.2"]]
    assert (await count(2))[:4] == [7, 1, 3, 2]


async def test_last_count_remains_when_lookups_fail(lookups):
    failures = [OSError(24, "Too many open files"), UnicodeError("label too long"), []]
    lookups[:] = [["10.0.0.1", "10.0.0.2"], *failures, ["10.0.0.1", "10.0.0.2", "10.0.0.3"]]
    assert await count(3) == [7, 2, 3]


async def test_configured_number_is_used_until_a_replica_is_ready(lookups):
    lookups[:] = [[], [], ["10.0.0.1"]]
    assert (await count(1))[:2] == [7, 1]


async def test_server_without_a_service_is_the_only_replica(lookups, monkeypatch):
    monkeypatch.delenv(ENV_PEERS)
    assert await count(1) == [1]
