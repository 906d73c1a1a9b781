"""A receiver takes parts from peers, and what a peer does wrong costs no more than a part."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from aiohttp import web

from rljob_api.wire import contract
from rljob_api.wire.weights import WeightManifest
from rljob_trainer.rollout import download
from rljob_trainer.rollout.download import SharedDownload
from rljob_trainer.rollout.weight_transfer import WeightClient
from rljob_trainer.weights.checksum import CHUNK_BYTES, HASH_BYTES, hash_file
from tests.support.loopback import next_address
from tests.support.waiting import DEADLINE_SECONDS
from tests.support.weight_hashes import hash_chunks

NUM_PARTS = 6
BODY = bytes(range(256)) * (NUM_PARTS * CHUNK_BYTES // 256 - 1)
HASHES = hash_chunks(memoryview(BODY))
TOKEN = "secret"


class Source:
    """Sends parts of BODY, unless `fault` says otherwise. Waits before each part, but the first `num_free`, until
    `is_open`."""

    def __init__(self, fault: str = "") -> None:
        self.host, self.fault = next_address(), fault
        self.is_open, self.was_asked = asyncio.Event(), asyncio.Event()
        self.is_open.set()
        self.num_parts, self.num_free = 0, 0

    @property
    def address(self) -> str:
        return f"{self.host}:{contract.PORT_WEIGHTS}"

    async def hashes(self, _: web.Request) -> web.Response:
        if self.fault == "other version":
            self.was_asked.set()
            raise web.HTTPNotFound
        if self.fault == "no hashes":
            self.was_asked.set()
            return web.Response(body=HASHES[1:])
        return web.Response(body=HASHES)

    async def part(self, request: web.Request) -> web.StreamResponse:
        self.was_asked.set()
        self.num_free -= 1
        if self.num_free < 0:
            await self.is_open.wait()
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers["Range"])
        assert found is not None
        body = BODY[int(found[1]) : int(found[2]) + 1]
        response = web.StreamResponse(status=206, headers={"Content-Length": str(len(body))})
        await response.prepare(request)
        if self.fault == "wrong bytes":
            body = body[:-1] + b"?"
        elif self.fault == "ends":
            await response.write(body[: len(body) // 2])
            assert request.transport is not None
            request.transport.abort()
            return response
        elif self.fault == "hangs":
            await response.write(body[:10])
            await asyncio.sleep(60)
        elif self.fault == "slow":
            for i in range(len(body)):
                await response.write(body[i : i + 1])
                await asyncio.sleep(0.01)
        await response.write(body)
        self.num_parts += 1
        return response


class Network:
    """Sources and receivers on this machine."""

    def __init__(self, stack: AsyncExitStack, folder: Path) -> None:
        self._stack, self._folder = stack, folder

    async def serve(self, fault: str = "") -> Source:
        source = Source(fault)
        app = web.Application()
        app.router.add_get("/weights/{name}", source.part)
        app.router.add_get("/weights/{name}/hashes", source.hashes)
        runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, source.host, contract.PORT_WEIGHTS).start()
        return source

    def receive(self) -> tuple[WeightClient, SharedDownload]:
        shared = SharedDownload(next_address(), TOKEN)
        folder = self._folder / shared.address
        folder.mkdir()
        client = WeightClient("head", TOKEN, lambda num_bytes: folder, shared)
        self._stack.push_async_callback(client.close)
        return client, shared


@pytest.fixture
async def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Network]:
    monkeypatch.setattr(download, "_CHUNKS_PER_PART", 1)
    async with AsyncExitStack() as stack:
        yield Network(stack, tmp_path)


def _manifest(publisher: Source, peers: list[str], version: int = 0) -> WeightManifest:
    return WeightManifest(
        generation="g",
        version=version,
        url=f"http://{publisher.address}/weights/g-{version}.safetensors",
        num_bytes=len(BODY),
        file_hash=hash_file(HASHES),
        checksum="c",
        peers=peers,
    )


def _ignore(num_bytes: int) -> None:
    pass


async def _wait_for(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():  # noqa: ASYNC110 - a thread changes it
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("fault", ["", "other version", "no hashes", "wrong bytes", "ends", "hangs", "slow"])
async def test_file_is_complete_whatever_a_peer_does(
    network: Network, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(download, "_PEER_SECONDS", 0.5)
    monkeypatch.setattr(download, "_PEER_PART_SECONDS", 0.5)
    publisher, peer = await network.serve(), await network.serve(fault)
    client, _ = network.receive()
    publisher.is_open.clear()
    fetching = asyncio.create_task(client.fetch_file(_manifest(publisher, [peer.address]), _ignore))
    async with asyncio.timeout(DEADLINE_SECONDS):
        await peer.was_asked.wait()
    publisher.is_open.set()
    assert (await fetching).read_bytes() == BODY
    assert publisher.num_parts + peer.num_parts >= NUM_PARTS


async def test_peer_that_cannot_be_reached_is_left_out(network: Network) -> None:
    publisher, (client, _) = await network.serve(), network.receive()
    manifest = _manifest(publisher, [f"{next_address()}:{contract.PORT_WEIGHTS}"])
    assert (await client.fetch_file(manifest, _ignore)).read_bytes() == BODY
    assert publisher.num_parts == NUM_PARTS


async def test_replica_that_has_the_file_gives_it_to_the_next_one(network: Network) -> None:
    publisher = await network.serve()
    (first, shared), (second, _) = network.receive(), network.receive()
    await first.fetch_file(_manifest(publisher, []), _ignore)
    publisher.is_open.clear()
    publisher.num_parts = 0
    received: list[int] = []
    fetching = asyncio.create_task(second.fetch_file(_manifest(publisher, [shared.address]), received.append))
    # The publisher has two requests, which it does not answer: all else comes from the replica.
    await _wait_for(lambda: max(received, default=0) > (NUM_PARTS - 3) * CHUNK_BYTES)
    publisher.is_open.set()
    assert (await fetching).read_bytes() == BODY
    assert publisher.num_parts == 2


async def test_replica_gives_away_what_it_has_before_its_download_ends(network: Network) -> None:
    """The first one stops in the middle; the second one gets all that the first one has, without the publisher."""
    publisher, other = await network.serve(), await network.serve()
    (first, shared), (second, _) = network.receive(), network.receive()
    publisher.is_open.clear()
    publisher.num_free = 3  # the order is random: the second one may have asked the other publisher for two of them
    fetching = asyncio.create_task(first.fetch_file(_manifest(publisher, []), _ignore))
    await _wait_for(lambda: publisher.num_parts == 3)
    received: list[int] = []
    other.is_open.clear()
    rest = asyncio.create_task(second.fetch_file(_manifest(other, [shared.address]), received.append))
    await _wait_for(lambda: bool(received))
    assert not fetching.done()
    assert not other.num_parts
    publisher.is_open.set()
    other.is_open.set()
    assert (await fetching).read_bytes() == (await rest).read_bytes() == BODY


async def test_next_version_ends_the_offer_of_the_previous_one(network: Network) -> None:
    publisher, (client, shared) = await network.serve(), network.receive()
    await client.fetch_file(_manifest(publisher, []), _ignore)
    with shared._find("g-0.safetensors") as found:
        assert found is not None
        assert found.hashes == HASHES
    publisher.is_open.clear()
    fetching = asyncio.create_task(client.fetch_file(_manifest(publisher, [], version=1), _ignore))
    async with asyncio.timeout(DEADLINE_SECONDS):
        publisher.was_asked.clear()
        await publisher.was_asked.wait()
    with shared._find("g-0.safetensors") as old, shared._find("g-1.safetensors") as new:
        assert old is None, "its bytes may be overwritten now"
        assert new is not None
        assert new.hashes == bytes(NUM_PARTS * HASH_BYTES), "nothing is verified yet"
    publisher.is_open.set()
    await fetching


def test_replica_whose_port_is_in_use_shares_nothing() -> None:
    host = next_address()
    first, second = SharedDownload(host, TOKEN), SharedDownload(host, TOKEN)
    assert (first.address, second.address) == (f"{host}:{contract.PORT_WEIGHTS}", "")
    first.close()
    second.close()
