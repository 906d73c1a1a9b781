"""The weight server: files match their manifests and need the token."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
import torch
from safetensors.torch import load

from rljob_api.errors import TransientError
from rljob_trainer.weights.checksum import digest_tensors
from rljob_trainer.weights.store import WeightStore
from tests.support.loopback import next_address

TOKEN = "secret"
HOST = next_address()


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WeightStore]:
    monkeypatch.setattr("rljob_trainer.weights.store.open_scratch_folder", lambda: tmp_path)
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
    manifest = store.publish(weights, "g1", 3)
    assert manifest.url == f"http://{HOST}:8200/weights/g1-3.safetensors"
    status, body = await _get(manifest.url)
    assert status == 200
    assert (len(body), hashlib.sha256(body).hexdigest()) == (manifest.num_bytes, manifest.sha256)
    assert manifest.checksum == str(digest_tensors(weights.values()))
    received = load(body)
    assert received.keys() == weights.keys()
    assert all(torch.equal(received[name], weights[name]) for name in weights)


@pytest.mark.parametrize("token", [None, "", "wrong", "secret2"])
async def test_nothing_is_served_without_the_token(store: WeightStore, token: str | None) -> None:
    manifest = store.publish(_weights(), "g1", 0)
    assert (await _get(manifest.url, token))[0] == 401
    assert (await _get(f"http://{HOST}:8200/", token))[0] == 401


async def test_newest_two_versions_are_kept(store: WeightStore, tmp_path: Path) -> None:
    manifests = [store.publish(_weights(seed), "g1", seed) for seed in range(4)]
    assert [(await _get(manifest.url))[0] for manifest in manifests] == [404, 404, 200, 200]
    assert len(os.listdir(tmp_path)) == 2, "old files occupy memory"


async def test_only_published_names_are_served(store: WeightStore, tmp_path: Path) -> None:
    store.publish(_weights(), "g1", 0)
    (tmp_path / "other.safetensors").write_bytes(b"not published")
    for name in ("other.safetensors", "..%2F..%2Fetc%2Fpasswd", "%2Fetc%2Fpasswd"):
        assert (await _get(f"http://{HOST}:8200/weights/{name}"))[0] == 404


def test_tied_names_are_written_once(store: WeightStore, tmp_path: Path) -> None:
    embedding = torch.randn(16, 4)
    manifest = store.publish({"embed": embedding, "head": embedding, "view": embedding.view(16, 4)}, "g1", 0)
    assert load((tmp_path / "g1-0.safetensors").read_bytes()).keys() == {"embed"}
    assert manifest.checksum == str(digest_tensors([embedding]))


def test_port_in_use_is_an_error(store: WeightStore) -> None:
    with pytest.raises(TransientError, match=f"{HOST}:8200"):
        WeightStore(HOST, TOKEN)
