"""The weight server: files match their manifests, need the token, and do not change while a replica reads them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
import torch
from safetensors.torch import load

from rljob_api.errors import TransientError
from rljob_trainer.weights.checksum import digest_tensors, hash_file
from rljob_trainer.weights.mapped import MappedFile, TensorSpec
from rljob_trainer.weights.store import WeightStore
from tests.support.loopback import next_address
from tests.support.weight_files import publish
from tests.support.weight_hashes import hash_chunks

TOKEN = "secret"
HOST = next_address()


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WeightStore]:
    monkeypatch.setattr("rljob_trainer.weights.store.open_scratch_folder", lambda num_bytes: tmp_path)
    store = WeightStore(HOST, TOKEN)
    yield store
    store.close()


async def _get(url: str, token: str | None = TOKEN) -> tuple[int, bytes]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as response:
        return response.status, await response.read()


def _weights(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {"a.weight": torch.randn(33, 7).bfloat16(), "norm.weight": torch.randn(7).bfloat16()}


async def test_published_file_matches_its_manifest(store: WeightStore) -> None:
    weights = _weights()
    manifest = publish(store, weights, "g1", 3)
    assert manifest.url == f"http://{HOST}:8200/weights/g1-3.safetensors"
    status, body = await _get(manifest.url)
    assert status == 200
    file_hash = hash_file(hash_chunks(memoryview(body)))
    assert (len(body), file_hash) == (manifest.num_bytes, manifest.file_hash)
    assert manifest.checksum == str(digest_tensors(weights.values()))
    other = publish(store, {"a": torch.arange(64.0)}, "g1", 4, "word")
    assert (other.digest_unit, other.checksum) == ("word", str(digest_tensors([torch.arange(64.0)], "word")))
    received = load(body)
    assert received.keys() == weights.keys()
    assert all(torch.equal(received[name], weights[name]) for name in weights)


async def test_ranges_and_the_hashes_of_chunks_are_served(store: WeightStore) -> None:
    manifest = publish(store, {"a": torch.arange(1 << 20)}, "g1", 0)
    _, body = await _get(manifest.url)
    headers = {"Authorization": f"Bearer {TOKEN}", "Range": "bytes=1000-2999"}
    async with aiohttp.ClientSession() as session, session.get(manifest.url, headers=headers) as response:
        assert (response.status, await response.read()) == (206, body[1000:3000])
    headers["Range"] = "bytes=9-1"
    async with aiohttp.ClientSession() as session, session.get(manifest.url, headers=headers) as response:
        assert response.status == 416
    assert await _get(manifest.url + "/hashes") == (200, hash_chunks(memoryview(body)))
    assert (await _get(manifest.url + "/hashes", "wrong"))[0] == 401


@pytest.mark.parametrize("token", [None, "", "wrong", "secret2"])
async def test_nothing_is_served_without_the_token(store: WeightStore, token: str | None) -> None:
    manifest = publish(store, _weights(), "g1", 0)
    assert (await _get(manifest.url, token))[0] == 401
    assert (await _get(f"http://{HOST}:8200/", token))[0] == 401


async def test_newest_two_versions_are_kept(store: WeightStore, tmp_path: Path) -> None:
    manifests = [publish(store, _weights(seed), "g1", seed) for seed in range(4)]
    assert [(await _get(manifest.url))[0] for manifest in manifests] == [404, 404, 200, 200]
    assert len(os.listdir(tmp_path)) == 3, "two are kept, and one is written again"


def test_memory_of_old_versions_is_used_again(store: WeightStore) -> None:
    files = [publish(store, _weights(seed), "g1", seed).local for seed in range(6)]
    inodes = [file.inode for file in files if file is not None]
    assert inodes == inodes[:3] * 2


def test_file_that_is_read_does_not_change(store: WeightStore) -> None:
    manifests = [publish(store, _weights(seed), "g1", seed) for seed in range(2)]
    assert manifests[0].local is not None
    reader = MappedFile(Path(manifests[0].local.path))
    assert reader.lock(exclusive=False)
    manifests += [publish(store, _weights(seed), "g1", seed) for seed in (2, 3, 4)]
    found = dict(reader.tensors())
    assert all(torch.equal(found[name], tensor) for name, tensor in _weights(0).items())
    assert reader.is_deleted(), "it must not occupy memory for longer than it is read"


async def test_download_of_an_old_version_continues(store: WeightStore) -> None:
    def large(seed: int) -> dict[str, torch.Tensor]:
        return {"a": torch.full((16 << 20,), seed, dtype=torch.int8)}

    manifest = publish(store, large(1), "g1", 1)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession() as session, session.get(manifest.url, headers=headers) as response:
        start = await response.content.readexactly(1 << 20)
        for version in range(2, 6):
            publish(store, large(version), "g1", version)
        body = start + await response.content.read()
    assert hash_file(hash_chunks(memoryview(body))) == manifest.file_hash


def test_failed_version_is_published_again(store: WeightStore, tmp_path: Path) -> None:
    weights = _weights()
    specs = {name: TensorSpec.of(tensor) for name, tensor in weights.items()}
    with pytest.raises(ValueError, match="not all tensors"):
        store.publish_stream(specs, list(weights.items())[:1], "g1", 0, "element")
    with pytest.raises(ValueError, match=r"norm\.weight"):
        store.publish_stream(specs, {"norm.weight": torch.ones(3)}.items(), "g1", 0, "element")
    assert [path.suffix for path in tmp_path.iterdir()] == [".partial"], "nothing can be requested"
    manifest = store.publish_stream(specs, reversed(list(weights.items())), "g1", 0, "element")
    assert manifest.checksum == str(digest_tensors(weights.values()))
    found = load((tmp_path / "g1-0.safetensors").read_bytes())
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("dtypes", [[torch.bfloat16, torch.float32], [torch.int8, torch.float64, torch.bool]])
def test_file_of_many_chunks_and_dtypes_is_what_safetensors_reads(
    store: WeightStore, tmp_path: Path, dtypes: list[torch.dtype]
) -> None:
    weights = {
        f"{i}.{dtype}": (torch.randn(size) * 100).to(dtype)
        for i, size in enumerate([(3,), (1 << 19, 3), (), (0, 4), (17, 1001), (1 << 20,)])
        for dtype in dtypes
    }
    weights["transposed"] = torch.randn(40, 30).T
    manifest = publish(store, weights, "g1", 0)
    body = (tmp_path / "g1-0.safetensors").read_bytes()
    found, mapped = load(body), dict(MappedFile(tmp_path / "g1-0.safetensors").tensors())
    assert found.keys() == mapped.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(found[name], tensor), name
        assert torch.equal(mapped[name], tensor), name
    assert manifest.checksum == str(digest_tensors(weights.values()))
    assert manifest.file_hash == hash_file(hash_chunks(memoryview(body)))


async def test_only_published_names_are_served(store: WeightStore, tmp_path: Path) -> None:
    publish(store, _weights(), "g1", 0)
    (tmp_path / "other.safetensors").write_bytes(b"not published")
    for name in ("other.safetensors", "..%2F..%2Fetc%2Fpasswd", "%2Fetc%2Fpasswd"):
        assert (await _get(f"http://{HOST}:8200/weights/{name}"))[0] == 404


def test_tied_names_are_written_once(store: WeightStore, tmp_path: Path) -> None:
    embedding = torch.randn(16, 4)
    manifest = publish(store, {"embed": embedding, "head": embedding, "view": embedding.view(16, 4)}, "g1", 0)
    assert load((tmp_path / "g1-0.safetensors").read_bytes()).keys() == {"embed"}
    assert manifest.checksum == str(digest_tensors([embedding]))


def test_port_in_use_is_an_error(store: WeightStore) -> None:
    with pytest.raises(TransientError, match=f"{HOST}:8200"):
        WeightStore(HOST, TOKEN)
