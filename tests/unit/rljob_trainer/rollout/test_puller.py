"""The pull loop with a scripted head, trainer and engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rljob_api.errors import TransientError
from rljob_api.wire.weights import PullReport, RolloutWeights, WeightManifest
from rljob_trainer.rollout.puller import ReplicaState, WeightPuller
from tests.support.waiting import DEADLINE_SECONDS


def _manifest(generation: str = "g1", version: int = 0) -> WeightManifest:
    return WeightManifest(
        generation=generation,
        version=version,
        url="http://trainer/weights",
        num_bytes=1,
        file_hash="s",
        checksum=f"c-{generation}-{version}",
    )


class PullerHarness:
    """The puller's environment; each part fails or blocks as the test sets."""

    def __init__(self) -> None:
        self.state = ReplicaState()
        self.exclusive = asyncio.Lock()
        self.manifests: asyncio.Queue[WeightManifest | Exception] = asyncio.Queue()
        self.is_warm = asyncio.Event()
        self.is_warm.set()
        self.drains: dict[str, asyncio.Event] = {}
        """Loads that wait for requests in flight, by key."""
        self.held: dict[str, asyncio.Event] = {}
        """Downloads that wait, by key."""
        self.download_failures: list[Exception] = []
        self.load_failures: list[Exception] = []
        self.queries: list[str] = []
        self.reports: list[PullReport | None] = []
        self.downloads: list[str] = []
        self.num_in_use = 0
        """Files that were fetched and not released."""
        self.cancelled: list[str] = []
        self.transfer_bytes = 7
        self.loaded: list[str] = []
        self.slept: list[float] = []

    async def fetch_manifest(self, after: str, report: PullReport | None) -> WeightManifest | None:
        self.queries.append(after)
        self.reports.append(report)
        answer = await self.manifests.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def warm_up(self) -> None:
        await self.is_warm.wait()

    async def fetch_file(self, manifest: WeightManifest, record_received: Callable[[int], None]) -> Path:
        self.downloads.append(manifest.key)
        record_received(7)
        try:
            await self.held.get(manifest.key, _open()).wait()
        except asyncio.CancelledError:
            self.cancelled.append(manifest.key)
            raise
        if self.download_failures:
            raise self.download_failures.pop()
        self.num_in_use += 1
        return Path("file")

    def release(self) -> None:
        self.num_in_use = 0

    async def load(
        self, path: Path, manifest: WeightManifest, record_draining: Callable[[bool], None]
    ) -> RolloutWeights:
        assert self.num_in_use == 1, "a file must not change while it is loaded"
        record_draining(True)
        await self.drains.get(manifest.key, _open()).wait()
        if self.load_failures:
            raise self.load_failures.pop()
        record_draining(False)
        self.loaded.append(manifest.key)
        return RolloutWeights(
            generation=manifest.generation,
            version=manifest.version,
            checksum=manifest.checksum,
            file_hash=manifest.file_hash,
        )

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        puller = WeightPuller(self.state, self, self, "10.0.0.7", self.sleep)  # type: ignore[arg-type]
        task = asyncio.create_task(puller.run())
        try:
            yield
        finally:
            assert not self.num_in_use or self.state.is_draining or not self.state.is_warm
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert not self.num_in_use

    def announce(self, manifest: WeightManifest | Exception) -> None:
        self.manifests.put_nowait(manifest)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not condition():  # noqa: ASYNC110 - the condition is any state of the harness
                await asyncio.sleep(0)


def _open() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@pytest.fixture
def harness() -> PullerHarness:
    return PullerHarness()


async def test_puller_serves_the_announced_weights_and_reports_its_download_time(harness: PullerHarness) -> None:
    harness.held["g1:4"] = asyncio.Event()
    async with harness.running():
        harness.announce(_manifest(version=4))
        await harness.until(lambda: harness.downloads)
        await asyncio.sleep(0.01)
        harness.held["g1:4"].set()
        await harness.until(lambda: not harness.state.reason_not_ready())
    serving = harness.state.serving
    assert (serving.key, serving.file_hash, serving.checksum) == ("g1:4", "s", "c-g1-4")
    assert serving.transfer_seconds >= 0.01
    assert serving.transfer_bytes == 7
    assert harness.queries[:2] == ["", "g1:4"], "the long poll names the announced version"


async def test_replica_is_ready_after_the_first_manifest_and_warm_up(harness: PullerHarness) -> None:
    harness.is_warm.clear()
    async with harness.running():
        assert "warming up" in harness.state.reason_not_ready()
        harness.announce(_manifest())
        await harness.until(lambda: harness.downloads)
        assert harness.loaded == [], "the engine is loaded only after its first request"
        harness.is_warm.set()
        await harness.until(lambda: not harness.state.reason_not_ready())
    assert "announced no weights" in _warm_state().reason_not_ready()


def _warm_state() -> ReplicaState:
    state = ReplicaState()
    state.is_warm = True
    return state


async def test_unreachable_head_is_retried_while_serving_continues(harness: PullerHarness) -> None:
    async with harness.running():
        harness.announce(_manifest())
        await harness.until(lambda: not harness.state.reason_not_ready())
        for _ in range(8):
            harness.announce(TransientError("connection refused"))
        await harness.until(lambda: len(harness.slept) == 8)
        assert not harness.state.reason_not_ready(), "a restart of the head does not make replicas unready"
        harness.announce(_manifest(version=1))
        await harness.until(lambda: harness.state.serving.key == "g1:1")
    assert harness.slept == [0.25, 0.5, 1, 2, 4, 8, 8, 8], "the backoff doubles up to a limit"


async def test_new_generation_replaces_a_higher_version(harness: PullerHarness) -> None:
    async with harness.running():
        harness.announce(_manifest("g1", 9))
        await harness.until(lambda: harness.state.serving.key == "g1:9")
        harness.announce(_manifest("g2", 3))
        await harness.until(lambda: harness.state.serving.key == "g2:3")
    assert harness.loaded == ["g1:9", "g2:3"]


async def test_newer_version_supersedes_a_running_download(harness: PullerHarness) -> None:
    harness.held["g1:0"] = asyncio.Event()
    async with harness.running():
        harness.announce(_manifest(version=0))
        await harness.until(lambda: harness.downloads == ["g1:0"])
        harness.announce(_manifest(version=1))
        harness.announce(_manifest(version=2))
        await harness.until(lambda: harness.state.serving.key == "g1:2")
    assert harness.cancelled[0] == "g1:0"
    assert harness.loaded == ["g1:2"], "versions in between are skipped"


async def test_replica_is_ready_with_the_announced_version_only() -> None:
    state = ReplicaState()
    state.record_change(is_warm=True, announced=_manifest(version=5))
    for generation, version, is_ready in (("g1", 5, True), ("g1", 4, False), ("g0", 5, False)):
        state.serving = RolloutWeights(generation=generation, version=version)
        assert (state.reason_not_ready() == "") == is_ready, (generation, version)
    assert "serves g0:5, but the head announces g1:5" in state.reason_not_ready()


async def test_wrong_file_is_downloaded_again(harness: PullerHarness) -> None:
    harness.download_failures.append(TransientError("hash differs"))
    async with harness.running():
        harness.announce(_manifest())
        await harness.until(lambda: not harness.state.reason_not_ready())
    assert harness.downloads == ["g1:0", "g1:0"]
    assert harness.loaded == ["g1:0"]


async def test_failed_download_keeps_serving_the_old_version(harness: PullerHarness) -> None:
    async with harness.running():
        harness.announce(_manifest(version=0))
        await harness.until(lambda: harness.state.serving.key == "g1:0")
        harness.held["g1:1"] = asyncio.Event()
        harness.download_failures.append(TransientError("not found"))
        harness.announce(_manifest(version=1))
        await harness.until(lambda: harness.downloads[-1] == "g1:1")
        assert harness.state.serving.key == "g1:0"
        assert not harness.state.is_broken
        assert "serves g1:0, but the head announces g1:1" in harness.state.reason_not_ready()


async def test_failed_load_stops_serving_until_one_succeeds(harness: PullerHarness) -> None:
    reasons: list[str] = []

    async def record_and_sleep(seconds: float) -> None:
        reasons.append(harness.state.reason_not_ready())
        assert harness.state.is_broken
        assert harness.state.serving.generation == "", "the engine's weights are undefined"
        await asyncio.sleep(0)

    harness.sleep = record_and_sleep  # type: ignore[method-assign]
    async with harness.running():
        harness.announce(_manifest(version=0))
        await harness.until(lambda: harness.state.serving.key == "g1:0")
        harness.load_failures.append(RuntimeError("no such parameter"))
        harness.announce(_manifest(version=1))
        await harness.until(lambda: harness.state.serving.key == "g1:1")
    assert "RuntimeError: no such parameter" in reasons[0]
    assert not harness.state.is_broken
    assert harness.state.error == ""


async def test_new_version_is_tried_at_once_after_a_failure(harness: PullerHarness) -> None:
    async def sleep_forever(seconds: float) -> None:
        await asyncio.Event().wait()

    harness.sleep = sleep_forever  # type: ignore[method-assign]
    harness.download_failures.append(TransientError("not found"))
    async with harness.running():
        harness.announce(_manifest(version=0))
        await harness.until(lambda: harness.state.error)
        harness.announce(_manifest(version=1))
        await harness.until(lambda: harness.state.serving.key == "g1:1")


async def test_engine_that_cannot_warm_up_ends_the_loop(harness: PullerHarness) -> None:
    async def fail() -> None:
        raise RuntimeError("the engine is dead")

    harness.warm_up = fail  # type: ignore[method-assign]
    with pytest.raises(ExceptionGroup):
        await WeightPuller(harness.state, harness, harness, "a").run()  # type: ignore[arg-type]


async def test_replica_reports_what_it_does_about_weights_that_it_does_not_serve(harness: PullerHarness) -> None:
    harness.drains["g1:0"] = asyncio.Event()
    async with harness.running():
        await harness.until(lambda: harness.reports)
        assert harness.reports == [None], "nothing is announced yet"
        harness.download_failures.append(TransientError("hash differs"))
        harness.announce(_manifest())
        await harness.until(lambda: harness.state.error)
        failed = harness.state.report("10.0.0.7")
        assert failed is not None
        assert (failed.key, failed.progress, failed.is_draining) == ("g1:0", 7, False)
        assert "hash differs" in failed.error
        await harness.until(lambda: harness.state.is_draining)
        draining = harness.state.report("10.0.0.7")
        assert draining is not None
        assert draining.is_draining
        harness.drains["g1:0"].set()
        await harness.until(lambda: not harness.state.reason_not_ready())
        assert harness.state.report("10.0.0.7") is None
        assert (harness.state.progress, harness.state.is_draining) == (8, False)
        harness.announce(TransientError("connection refused"))
        await harness.until(lambda: harness.state.head_error)
        assert harness.state.report("10.0.0.7") is None, "it serves what it knows to be announced"
    assert [report and report.replica for report in harness.reports[:2]] == [None, "10.0.0.7"]


async def test_error_of_a_load_is_reported_while_the_head_is_reachable(harness: PullerHarness) -> None:
    harness.load_failures += [RuntimeError("out of memory" + 1000 * "!")] * 2
    async with harness.running():
        harness.announce(_manifest())
        await harness.until(lambda: harness.state.error)
        report = harness.state.report("10.0.0.7")
        assert report is not None
        assert "out of memory" in report.error
        assert not report.is_draining, "nothing waits for requests any longer"


def test_a_file_of_many_gigabytes_can_be_reported() -> None:
    state = _warm_state()
    state.record_change(announced=_manifest(), progress=200 << 30)
    report = state.report("10.0.0.7")
    assert report is not None
    assert report.progress == 200 << 30
