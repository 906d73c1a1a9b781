"""The pull loop against a scripted head, trainer and engine: what it serves, when it is ready, what it gives up on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rljob_api.errors import TransientError
from rljob_api.wire.protocol import WeightManifest
from rljob_trainer.rollout.puller import ApplyResult, Download, ReplicaState, WeightPuller


def _manifest(generation: str = "g1", version: int = 0) -> WeightManifest:
    return WeightManifest(
        generation=generation,
        version=version,
        url="http://trainer/weights",
        num_bytes=1,
        sha256="s",
        checksum=f"c-{generation}-{version}",
    )


class World:
    """Everything around the puller. Each part fails or blocks as the test says."""

    def __init__(self, max_staleness: int = 0) -> None:
        self.state = ReplicaState(max_staleness)
        self.manifests: asyncio.Queue[WeightManifest | Exception] = asyncio.Queue()
        self.is_warm = asyncio.Event()
        self.is_warm.set()
        self.held: dict[str, asyncio.Event] = {}
        """Downloads that wait, by key."""
        self.download_failures: list[Exception] = []
        self.apply_failures: list[Exception] = []
        self.wrong_checksums: list[str] = []
        self.asked_after: list[str] = []
        self.begun: list[str] = []
        self.cancelled: list[str] = []
        self.applied: list[str] = []
        self.slept: list[float] = []

    async def fetch_manifest(self, after: str) -> WeightManifest | None:
        self.asked_after.append(after)
        answer = await self.manifests.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def fetch_file(self, manifest: WeightManifest) -> Download:
        self.begun.append(manifest.key)
        try:
            await self.held.get(manifest.key, _open()).wait()
        except asyncio.CancelledError:
            self.cancelled.append(manifest.key)
            raise
        if self.download_failures:
            raise self.download_failures.pop()
        return Download(Path("file"), seconds=2.0)

    async def apply(self, path: Path, manifest: WeightManifest) -> ApplyResult:
        if self.apply_failures:
            raise self.apply_failures.pop()
        self.applied.append(manifest.key)
        checksum = self.wrong_checksums.pop() if self.wrong_checksums else manifest.checksum
        return ApplyResult(checksum, pause_seconds=0.5, load_seconds=0.25)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        puller = WeightPuller(
            self.state,
            wait_until_warm=self.is_warm.wait,  # type: ignore[arg-type]
            fetch_manifest=self.fetch_manifest,
            fetch_file=self.fetch_file,
            apply=self.apply,
            sleep=self.sleep,
        )
        task = asyncio.create_task(puller.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def announce(self, manifest: WeightManifest | Exception) -> None:
        self.manifests.put_nowait(manifest)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(5):
            while not condition():  # noqa: ASYNC110 - the condition is any state of the world
                await asyncio.sleep(0)


def _open() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@pytest.fixture
def world() -> World:
    return World()


async def test_it_serves_what_the_head_announces_and_says_what_it_took(world: World) -> None:
    async with world.running():
        world.announce(_manifest(version=4))
        await world.until(lambda: not world.state.reason_not_ready())
    serving = world.state.serving
    assert (serving.key, serving.sha256, serving.checksum) == ("g1:4", "s", "c-g1-4")
    assert (serving.transfer_seconds, serving.pause_seconds, serving.load_seconds) == (2.0, 0.5, 0.25)
    assert world.asked_after[:2] == ["", "g1:4"], "the long-poll goes on after what was announced"


async def test_it_is_not_ready_before_the_first_manifest_nor_before_it_is_warm(world: World) -> None:
    world.is_warm.clear()
    async with world.running():
        assert "warming up" in world.state.reason_not_ready()
        world.announce(_manifest())
        await world.until(lambda: world.begun)
        assert world.applied == [], "the engine is loaded only after its first request"
        world.is_warm.set()
        await world.until(lambda: not world.state.reason_not_ready())
    assert "announced no weights" in _warm_state().reason_not_ready()


def _warm_state() -> ReplicaState:
    state = ReplicaState()
    state.is_warm = True
    return state


async def test_a_head_that_cannot_be_reached_is_asked_again_and_serving_goes_on(world: World) -> None:
    async with world.running():
        world.announce(_manifest())
        await world.until(lambda: not world.state.reason_not_ready())
        for _ in range(8):
            world.announce(TransientError("refused"))
        await world.until(lambda: len(world.slept) == 8)
        assert not world.state.reason_not_ready(), "a head that restarts takes no replica out of service"
        world.announce(_manifest(version=1))
        await world.until(lambda: world.state.serving.key == "g1:1")
    assert world.slept == [0.25, 0.5, 1, 2, 4, 8, 8, 8], "waits double up to a limit"


async def test_a_new_generation_is_taken_although_its_number_is_lower(world: World) -> None:
    async with world.running():
        world.announce(_manifest("g1", 9))
        await world.until(lambda: world.state.serving.key == "g1:9")
        world.announce(_manifest("g2", 3))
        await world.until(lambda: world.state.serving.key == "g2:3")
    assert world.applied == ["g1:9", "g2:3"]


async def test_a_newer_version_during_a_download_is_fetched_instead(world: World) -> None:
    world.held["g1:0"] = asyncio.Event()
    async with world.running():
        world.announce(_manifest(version=0))
        await world.until(lambda: world.begun == ["g1:0"])
        world.announce(_manifest(version=1))
        world.announce(_manifest(version=2))
        await world.until(lambda: world.state.serving.key == "g1:2")
    assert world.cancelled[0] == "g1:0"
    assert world.applied == ["g1:2"], "versions in between are skipped"


async def test_a_download_that_is_fresh_enough_is_not_given_up() -> None:
    world = World(max_staleness=1)
    world.held["g1:0"] = asyncio.Event()
    async with world.running():
        world.announce(_manifest(version=0))
        await world.until(lambda: world.begun == ["g1:0"])
        world.announce(_manifest(version=1))
        await world.until(lambda: world.state.announced == _manifest(version=1))
        world.held["g1:0"].set()
        await world.until(lambda: world.state.serving.key == "g1:1")
    assert world.applied == ["g1:0", "g1:1"]


async def test_staleness_within_the_limit_is_ready_and_beyond_it_is_not() -> None:
    state = ReplicaState(max_staleness=1)
    state.record_change(is_warm=True, announced=_manifest(version=5))
    for version, is_ready in ((6, True), (5, True), (4, True), (3, False)):
        state.serving = state.serving.model_copy(update={"generation": "g1", "version": version})
        assert (state.reason_not_ready() == "") == is_ready, version
    state.serving = state.serving.model_copy(update={"generation": "g0", "version": 5})
    assert "serves g0:5, the head announces g1:5" in state.reason_not_ready()


async def test_a_file_that_is_wrong_is_fetched_again(world: World) -> None:
    world.download_failures.append(TransientError("sha256 differs"))
    async with world.running():
        world.announce(_manifest())
        await world.until(lambda: not world.state.reason_not_ready())
    assert world.begun == ["g1:0", "g1:0"]
    assert world.applied == ["g1:0"]


async def test_a_failed_download_leaves_the_old_version_serving(world: World) -> None:
    async with world.running():
        world.announce(_manifest(version=0))
        await world.until(lambda: world.state.serving.key == "g1:0")
        world.held["g1:1"] = asyncio.Event()
        world.download_failures.append(TransientError("gone"))
        world.announce(_manifest(version=1))
        await world.until(lambda: world.begun[-1] == "g1:1")
        assert world.state.serving.key == "g1:0"
        assert not world.state.is_broken
        assert "serves g1:0, the head announces g1:1" in world.state.reason_not_ready()


async def test_after_a_failed_load_nothing_is_served_until_one_succeeds(world: World) -> None:
    reached: list[str] = []

    async def note_and_sleep(seconds: float) -> None:
        reached.append(world.state.reason_not_ready())
        assert world.state.is_broken
        assert world.state.serving.generation == "", "the engine's weights have no name now"
        await asyncio.sleep(0)

    world.sleep = note_and_sleep  # type: ignore[method-assign]
    async with world.running():
        world.announce(_manifest(version=0))
        await world.until(lambda: world.state.serving.key == "g1:0")
        world.apply_failures.append(RuntimeError("no such parameter"))
        world.announce(_manifest(version=1))
        await world.until(lambda: world.state.serving.key == "g1:1")
    assert "RuntimeError: no such parameter" in reached[0]
    assert not world.state.is_broken
    assert world.state.error == ""


async def test_an_engine_that_holds_other_weights_than_published_is_not_ready(world: World) -> None:
    world.wrong_checksums.append("c-other")
    async with world.running():
        world.announce(_manifest())
        await world.until(lambda: world.state.error)
        assert "the engine holds c-other, published was c-g1-0" in world.state.reason_not_ready()
        await world.until(lambda: not world.state.reason_not_ready())
    assert world.applied == ["g1:0", "g1:0"]


async def test_another_version_is_tried_at_once_after_a_failure(world: World) -> None:
    async def sleep_for_ever(seconds: float) -> None:
        await asyncio.Event().wait()

    world.sleep = sleep_for_ever  # type: ignore[method-assign]
    world.download_failures.append(TransientError("gone"))
    async with world.running():
        world.announce(_manifest(version=0))
        await world.until(lambda: world.state.error)
        world.announce(_manifest(version=1))
        await world.until(lambda: world.state.serving.key == "g1:1")


async def test_an_engine_that_cannot_warm_up_ends_the_loop(world: World) -> None:
    async def fail() -> None:
        raise RuntimeError("the engine is dead")

    puller = WeightPuller(
        world.state,
        wait_until_warm=fail,
        fetch_manifest=world.fetch_manifest,
        fetch_file=world.fetch_file,
        apply=world.apply,
    )
    with pytest.raises(ExceptionGroup):
        await puller.run()
