"""The update of the rollouts, which may outlast a step."""

import asyncio
import contextlib

import pytest

from rljob_api.errors import TransientError
from rljob_api.wire.weights import WeightManifest
from rljob_trainer.driver.publisher import Publisher
from rljob_trainer.driver.status import StatusBoard


class World:
    """What a publisher talks to: each part records what it is asked for."""

    def __init__(self):
        self.events, self.synced, self.generated = [], asyncio.Event(), asyncio.Event()
        self.error, self.clock = None, self
        self.generated.set()

    async def publish(self, version):
        self.events.append(f"publish {version}")
        return WeightManifest(generation="g", version=version, url="http://x", num_bytes=1, file_hash="s", checksum="c")

    async def give_to_rollouts(self, manifest):
        self.events.append(f"turn {manifest.version}")

    def require(self, manifest):
        self.events.append(f"require {manifest.version}")

    async def sync(self, manifest):
        await self.synced.wait()
        if self.error is not None:
            raise self.error
        self.events.append(f"served {manifest.version}")
        return {}

    async def wait_until_generated(self):
        await self.generated.wait()

    def phase(self, name):
        return contextlib.nullcontext()

    def publishing(self):
        return contextlib.nullcontext()

    def record_published(self, manifest):
        pass

    def record_weights(self, manifest, served):
        self.events.append(f"record {manifest.version}")


def publisher_of(world, *, spans_updates=True, has_rollouts=True):
    board = StatusBoard()
    return Publisher(world, world, world, board, world, world, has_rollouts, spans_updates)


async def test_nothing_is_published_without_rollouts():
    world = World()
    async with publisher_of(world, has_rollouts=False) as publisher:
        await publisher.publish(0)
        await publisher.wait()
    assert world.events == []


async def is_open(task):
    for _ in range(10):
        await asyncio.sleep(0)
    return not task.done()


@pytest.mark.parametrize(("version", "spans_updates"), [(0, True), (1, False)])
async def test_first_weights_and_those_that_no_request_may_span_are_waited_for(version, spans_updates):
    world = World()
    async with publisher_of(world, spans_updates=spans_updates) as publisher:
        publishing = asyncio.create_task(publisher.publish(version))
        assert await is_open(publishing)
        world.synced.set()
        await publishing
    assert world.events == [f"{what} {version}" for what in ("publish", "require", "turn", "served", "record")]


async def test_step_begins_while_the_rollouts_update_and_the_next_weights_wait_for_them():
    world = World()
    async with publisher_of(world) as publisher:
        await publisher.publish(1)
        following = asyncio.create_task(publisher.publish(2))
        assert await is_open(following)
        assert world.events == ["publish 1", "require 1", "turn 1"]
        world.synced.set()
        await following
    assert world.events[3:7] == ["served 1", "record 1", "publish 2", "require 2"]


async def test_weights_wait_for_the_completions_of_an_evaluation():
    world = World()
    world.generated.clear()
    async with publisher_of(world) as publisher:
        publishing = asyncio.create_task(publisher.publish(1))
        assert await is_open(publishing)
        assert world.events == []
        world.generated.set()
        await publishing


async def test_failed_update_is_raised_to_each_wait_and_a_cancelled_wait_leaves_it():
    world = World()
    async with publisher_of(world) as publisher:
        await publisher.publish(1)
        waiting = asyncio.create_task(publisher.wait())
        assert await is_open(waiting)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        world.error = TransientError("no rollout")
        world.synced.set()
        with pytest.raises(TransientError, match="no rollout"):
            await publisher.wait()
        with pytest.raises(TransientError, match="no rollout"):
            await publisher.publish(2)


async def test_leaving_the_context_ends_an_update():
    world = World()
    async with publisher_of(world) as publisher:
        await publisher.publish(1)
    world.synced.set()
    await asyncio.sleep(0)
    assert world.events == ["publish 1", "require 1", "turn 1"]
