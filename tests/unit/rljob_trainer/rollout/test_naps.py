"""Sleep and wake-up of a replica, with the real puller and a scripted head, trainer and engine."""

from __future__ import annotations

import asyncio

import pytest

from rljob_trainer.rollout.naps import Naps, NotWarmError
from tests.unit.rljob_trainer.rollout.test_puller import PullerHarness, _manifest


class SleepingHarness(PullerHarness):
    """The engine also sleeps. It fails the test if it loads while it sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.sleep_failures: list[Exception] = []
        self.naps = Naps(self.state, _Engine(self), 2)  # type: ignore[arg-type]


class _Engine:
    """EngineLoader's methods for naps."""

    def __init__(self, harness: SleepingHarness) -> None:
        self._harness, self.exclusive = harness, harness.exclusive

    async def sleep(self, level: int) -> None:
        if self._harness.sleep_failures:
            raise self._harness.sleep_failures.pop()
        await asyncio.sleep(0.01)
        self._harness.calls.append(f"sleep {level}")

    async def wake_weights(self, level: int) -> None:
        self._harness.calls.append(f"wake {level}")

    async def measure(self) -> int:
        return 5 << 30


@pytest.fixture
def harness() -> SleepingHarness:
    return SleepingHarness()


async def _serve(harness: SleepingHarness, version: int) -> None:
    harness.announce(_manifest(version=version))
    await harness.until(lambda: harness.state.serving.key == f"g1:{version}")


async def test_sleeping_replica_serves_nothing_loads_nothing_and_is_not_stalled(harness: SleepingHarness) -> None:
    async with harness.running():
        await _serve(harness, 0)
        memory = await harness.naps.sleep()
        assert (memory.num_bytes, harness.calls) == (5 << 30, ["sleep 2"])
        assert harness.state.serving.generation == ""
        assert "asleep" in harness.state.reason_not_ready()
        harness.announce(_manifest(version=1))
        await harness.until(lambda: harness.state.announced == _manifest(version=1))
        await asyncio.sleep(0.01)
        assert harness.state.report("a") is None
        assert harness.downloads == ["g1:0"], "not even the file is fetched"
    assert harness.loaded == ["g1:0"]


async def test_woken_replica_loads_the_wanted_version_and_no_older_one(harness: SleepingHarness) -> None:
    async with harness.running():
        await _serve(harness, 0)
        await harness.naps.sleep()
        await harness.naps.wake("g1", 2)
        assert harness.calls == ["sleep 2", "wake 2"]
        harness.announce(_manifest(version=1))
        await harness.until(lambda: harness.state.announced == _manifest(version=1))
        assert harness.state.report("a") is None, "it waits for the driver, not the driver for it"
        assert harness.state.reason_not_ready()
        await _serve(harness, 2)
    assert harness.loaded == ["g1:0", "g1:2"]


async def test_newer_version_and_one_of_a_new_driver_are_also_loaded(harness: SleepingHarness) -> None:
    async with harness.running():
        for manifest in (_manifest(version=7), _manifest("g2", 0)):
            await _serve(harness, 6)
            await harness.naps.sleep()
            await harness.naps.wake("g1", 6)
            harness.announce(manifest)
            await harness.until(lambda manifest=manifest: harness.state.serving.key == manifest.key)


async def test_announcement_of_a_dead_driver_is_not_loaded(harness: SleepingHarness) -> None:
    async with harness.running():
        await _serve(harness, 5)
        await harness.naps.sleep()
        await harness.naps.wake("g2", 0)
        await asyncio.sleep(0.01)
        harness.announce(_manifest("g2", 0))
        await harness.until(lambda: harness.state.serving.key == "g2:0")
    assert harness.loaded == ["g1:5", "g2:0"]


async def test_version_that_was_announced_during_the_sleep_is_loaded_at_once(harness: SleepingHarness) -> None:
    async with harness.running():
        await _serve(harness, 0)
        await harness.naps.sleep()
        harness.announce(_manifest(version=1))
        await harness.until(lambda: harness.state.announced == _manifest(version=1))
        await harness.naps.wake("g1", 1)
        await harness.until(lambda: harness.state.serving.key == "g1:1")


async def test_requests_may_be_repeated(harness: SleepingHarness) -> None:
    async with harness.running():
        await _serve(harness, 0)
        await harness.naps.wake("g1", 0)
        assert harness.state.serving.key == "g1:0", "it serves on"
        for _ in range(2):
            await harness.naps.sleep()
        for _ in range(2):
            await harness.naps.wake("g1", 0)
        await harness.until(lambda: harness.state.serving.key == "g1:0")
    assert harness.calls == ["sleep 2", "sleep 2", "wake 2"]
    assert harness.loaded == ["g1:0", "g1:0"]


async def test_sleep_waits_for_a_running_load_which_then_serves_nothing(harness: SleepingHarness) -> None:
    harness.drains["g1:0"] = asyncio.Event()
    async with harness.running():
        harness.announce(_manifest())
        await harness.until(lambda: harness.state.is_draining)
        sleep = asyncio.create_task(harness.naps.sleep())
        await asyncio.sleep(0.01)
        assert harness.calls == []
        assert "asleep" in harness.state.reason_not_ready(), "nothing is served from now on"
        harness.drains["g1:0"].set()
        await sleep
        assert (harness.calls, harness.state.serving.generation) == (["sleep 2"], "")


async def test_sleep_ends_a_running_download(harness: SleepingHarness) -> None:
    harness.held["g1:0"] = asyncio.Event()
    async with harness.running():
        harness.announce(_manifest())
        await harness.until(lambda: harness.downloads)
        await harness.naps.sleep()
        await harness.until(lambda: harness.cancelled == ["g1:0"])
    assert harness.loaded == []


async def test_error_of_a_load_is_forgotten_by_a_sleep(harness: SleepingHarness) -> None:
    harness.load_failures += [RuntimeError("half a load")]
    harness.sleep = _sleep_forever  # type: ignore[method-assign]
    async with harness.running():
        harness.announce(_manifest())
        await harness.until(lambda: harness.state.is_broken)
        await harness.naps.sleep()
        await harness.naps.wake("g1", 0)
        await harness.until(lambda: harness.state.serving.key == "g1:0")


async def _sleep_forever(_: float) -> None:
    await asyncio.Event().wait()


async def test_engine_that_fails_to_sleep_serves_nothing(harness: SleepingHarness) -> None:
    async with harness.running():
        await _serve(harness, 0)
        harness.sleep_failures.append(RuntimeError("CUDA error"))
        with pytest.raises(RuntimeError):
            await harness.naps.sleep()
        assert harness.state.reason_not_ready()
        await harness.naps.sleep()


async def test_engine_that_is_not_warm_refuses(harness: SleepingHarness) -> None:
    harness.is_warm.clear()
    async with harness.running():
        with pytest.raises(NotWarmError, match="warming up"):
            await harness.naps.sleep()
        with pytest.raises(NotWarmError, match="warming up"):
            await harness.naps.wake("g1", 0)
        assert not harness.state.is_asleep
