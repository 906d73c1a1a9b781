"""A receiver with the version before gets what changed, and ends with the announced file whatever happens to that."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch

from rljob_api.errors import TransientError
from rljob_api.wire.weights import WeightManifest
from rljob_trainer.rollout import download
from rljob_trainer.rollout.download import SharedDownload
from rljob_trainer.rollout.weight_transfer import WeightClient
from rljob_trainer.weights.checksum import CHUNK_BYTES, digest_tensors
from rljob_trainer.weights.mapped import MappedFile
from rljob_trainer.weights.store import WeightStore
from tests.support.loopback import next_address
from tests.support.weight_files import publish

TOKEN = "secret"
NUM_CHUNKS = 5


class Trainer:
    """Publishes weights that an update changes a little."""

    def __init__(self, store: WeightStore) -> None:
        self.store, self.version = store, 0
        self.weights = {"a": torch.randn(NUM_CHUNKS * CHUNK_BYTES // 2 - 700).bfloat16()}

    def publish(self, num_changed: int = 1000) -> WeightManifest:
        self.version += 1
        values = self.weights["a"].view(torch.int16)
        values[torch.randperm(len(values))[:num_changed]] ^= 1
        manifest = publish(self.store, self.weights, "g", self.version)
        return manifest.model_copy(update={"local": None})


class Replica:
    def __init__(self, folder: Path) -> None:
        self.shared = SharedDownload(next_address(), TOKEN)
        (folder / self.shared.address).mkdir()
        self.client = WeightClient("head", TOKEN, lambda _: folder / self.shared.address, self.shared)

    async def fetch(self, manifest: WeightManifest, *peers: Replica) -> int:
        """Fetch, compare the digest, and return the bytes that came."""
        given = manifest.model_copy(update={"peers": [peer.shared.address for peer in peers]})
        path = await self.client.fetch_file(given, lambda _: None)
        tensors = [tensor for _, tensor in MappedFile(path).tensors()]
        assert str(digest_tensors(tensors, manifest.digest_unit)) == manifest.checksum
        return self.client.transfer_bytes


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trainer]:
    monkeypatch.setattr("rljob_trainer.weights.store.open_scratch_folder", lambda _: tmp_path)
    monkeypatch.setattr(download, "_CHUNKS_PER_PART", 2)
    store = WeightStore(next_address(), TOKEN)
    yield Trainer(store)
    store.close()


@pytest.fixture
async def replicas(tmp_path: Path) -> AsyncIterator[list[Replica]]:
    async with AsyncExitStack() as stack:
        found = [Replica(tmp_path) for _ in range(2)]
        for replica in found:
            stack.push_async_callback(replica.client.close)
        yield found


async def test_what_changed_is_sent_for_fifty_updates(trainer: Trainer, replicas: list[Replica]) -> None:
    whole = await replicas[0].fetch(trainer.publish())
    assert whole > (NUM_CHUNKS - 1) * CHUNK_BYTES
    for _ in range(50):
        assert await replicas[0].fetch(trainer.publish()) < 0.01 * whole


async def test_large_update_is_sent_whole(trainer: Trainer, replicas: list[Replica]) -> None:
    whole = await replicas[0].fetch(trainer.publish())
    assert await replicas[0].fetch(trainer.publish(num_changed=10**7)) >= whole


async def test_missed_version_is_sent_whole(trainer: Trainer, replicas: list[Replica]) -> None:
    whole = await replicas[0].fetch(trainer.publish())
    trainer.publish()
    assert await replicas[0].fetch(trainer.publish()) == whole


async def test_peer_passes_on_what_changed(
    trainer: Trainer, replicas: list[Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = replicas
    whole = await first.fetch(trainer.publish())
    await second.fetch(manifest := trainer.publish(), first)
    await first.fetch(manifest)
    manifest = trainer.publish()
    await first.fetch(manifest)
    monkeypatch.setattr(trainer.store._server, "_find", None)  # its answers are errors from now on
    with pytest.raises(TransientError):
        await second.fetch(manifest)
    with first.shared._find(manifest.url.rpartition("/")[2]) as file:
        assert file is not None
        assert sum(map(len, file.deltas.values())) < 0.01 * whole
        assert [len(part) for part in file.changes(0, len(file.data))][1::2] == [
            len(file.deltas[i]) for i in range(NUM_CHUNKS)
        ]


async def test_last_chunk_that_is_shorter_than_its_delta_is_sent_as_it_is(
    trainer: Trainer, replicas: list[Replica]
) -> None:
    trainer.weights = {"a": torch.zeros((CHUNK_BYTES - 80) // 2 + 4, dtype=torch.bfloat16)}  # with a header of 80 bytes
    whole = await replicas[0].fetch(trainer.publish())
    assert whole == CHUNK_BYTES + 8
    assert await replicas[0].fetch(trainer.publish()) < 0.01 * whole


@pytest.mark.parametrize("fault", ["damaged", "cut", "repeated", "too long"])
@pytest.mark.parametrize("index", [0, 1, NUM_CHUNKS - 1])
async def test_fault_in_what_changed_is_found_and_costs_one_whole_copy(
    trainer: Trainer, replicas: list[Replica], fault: str, index: int
) -> None:
    whole = await replicas[0].fetch(trainer.publish())
    manifest = trainer.publish()
    with trainer.store._reading(manifest.url.rpartition("/")[2]) as file:
        assert file is not None
        list(file.changes(0, len(file.data)))
        delta = file.deltas[index]
        file.deltas[index] = {
            "damaged": delta[:-1] + bytes([delta[-1] ^ 1]),
            "cut": delta[:-3],
            "repeated": delta + delta,
            "too long": bytes(CHUNK_BYTES + 1),
        }[fault]
    with pytest.raises(TransientError):
        await replicas[0].fetch(manifest)
    assert await replicas[0].fetch(manifest) == whole


async def test_part_that_a_peer_cuts_off_is_sent_whole(trainer: Trainer, replicas: list[Replica]) -> None:
    """Its first chunk is new then: a second delta would turn it back."""
    first, second = replicas
    await first.fetch(manifest := trainer.publish())
    await second.fetch(manifest)
    manifest = trainer.publish()
    await first.fetch(manifest)
    with first.shared._find(manifest.url.rpartition("/")[2]) as file:
        assert file is not None
        for i in (1, 3, NUM_CHUNKS - 1):
            file.deltas[i] = b"damaged"
    await second.fetch(manifest, first)
