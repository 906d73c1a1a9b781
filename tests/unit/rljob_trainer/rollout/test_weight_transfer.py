"""Downloads end with a correct file or an error; a load always resumes the engine that it paused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file, save_file

from rljob_api.errors import TransientError
from rljob_api.manifest.roles import Lora
from rljob_api.wire import contract
from rljob_api.wire.weights import LocalFile, PullReport, WeightManifest, slot_name
from rljob_trainer.rollout import weight_transfer
from rljob_trainer.rollout.weight_transfer import AdapterFolder, EngineLoader, WeightClient, build_folders
from rljob_trainer.weights.checksum import Digest, hash_file
from rljob_trainer.weights.mapped import MappedFile, boot_id
from tests.support.loopback import next_address
from tests.support.waiting import DEADLINE_SECONDS
from tests.support.weight_hashes import hash_chunks

HEAD, TRAINER = next_address(), next_address()
BODY = bytes(range(256)) * 40_000
SMALL = b"small" * 100


def _manifest(path: str = "whole", body: bytes = BODY, version: int = 0) -> WeightManifest:
    return WeightManifest(
        generation="g",
        version=version,
        url=f"http://{TRAINER}:{contract.PORT_WEIGHTS}/{path}",
        num_bytes=len(body),
        file_hash=hash_file(hash_chunks(memoryview(body))),
        checksum="c",
    )


def _ignore(value: int) -> None:
    pass


class Servers:
    """The endpoints of a head and a trainer that a rollout uses."""

    def __init__(self) -> None:
        self.queries: list[dict[str, str]] = []
        self.tokens: set[str] = set()
        self.response = web.Response(status=204)

    async def current(self, request: web.Request) -> web.Response:
        self.queries.append(dict(request.query))
        self.tokens.add(request.headers["Authorization"])
        return self.response

    async def hashes(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name == "missing":
            return web.Response(status=404, text="no longer kept")
        other = {"small": SMALL, "other": BODY[:-1] + b"x", "many": BODY * 2}
        return web.Response(body=hash_chunks(memoryview(other.get(name, BODY))))

    async def file(self, request: web.Request) -> web.StreamResponse:
        self.tokens.add(request.headers["Authorization"])
        other = {"small": SMALL, "short": BODY[:-1], "changed": b"\x01" + BODY[1:]}
        name = request.match_info["name"]
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers["Range"])
        assert found is not None
        body = other.get(name, BODY)[int(found[1]) : int(found[2]) + 1]
        response = web.StreamResponse(status=206, headers={"Content-Length": str(len(body))})
        await response.prepare(request)
        if name == "cut":
            await response.write(body[: len(body) // 2])
            assert request.transport is not None
            request.transport.abort()
        elif name == "stuck":
            await response.write(body[:1000])
            await asyncio.sleep(60)
        else:
            await response.write(body)
        return response


@pytest.fixture
async def servers() -> AsyncIterator[Servers]:
    servers = Servers()
    runners = []
    for host, port, routes in (
        (HEAD, contract.PORT_DRIVER, {str(contract.UrlPath.WEIGHTS_CURRENT): servers.current}),
        (TRAINER, contract.PORT_WEIGHTS, {"/{name}": servers.file, "/{name}/hashes": servers.hashes}),
    ):
        app = web.Application()
        for path, handler in routes.items():
            app.router.add_get(path, handler)
        runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, host, port).start()
        runners.append(runner)
    yield servers
    for runner in runners:
        await runner.cleanup()


@pytest.fixture
async def client(servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[WeightClient]:
    (tmp_path / "hosts").write_text(f"{HEAD} head\n")
    monkeypatch.setenv(contract.ENV_HOSTS_FILE, str(tmp_path / "hosts"))
    (tmp_path / "scratch").mkdir()
    client = WeightClient("head", "secret", lambda num_bytes: tmp_path / "scratch")
    yield client
    await client.close()


async def test_manifest_request_names_the_known_version(client: WeightClient, servers: Servers) -> None:
    assert await client.fetch_manifest("g:1", None) is None
    servers.response = web.json_response(text=_manifest().model_dump_json())
    assert await client.fetch_manifest("", None) == _manifest()
    assert servers.queries == [{"after": "g:1", "timeout": "30"}, {"after": "", "timeout": "30"}]
    assert servers.tokens == {"Bearer secret"}


async def test_replica_with_something_to_report_polls_more_often(client: WeightClient, servers: Servers) -> None:
    report = PullReport(replica="10.0.0.7", key="g:1", progress=3, error="no space")
    await client.fetch_manifest("g:1", report)
    assert servers.queries == [{"after": "g:1", "timeout": "5", "report": report.model_dump_json()}]


@pytest.mark.parametrize(
    "response", [web.Response(status=503, text="starting"), web.Response(text="no json"), web.Response(status=401)]
)
async def test_invalid_response_of_the_head_is_a_transient_error(
    client: WeightClient, servers: Servers, response: web.Response
) -> None:
    servers.response = response
    with pytest.raises(TransientError, match="/weights/current"):
        await client.fetch_manifest("", None)


async def test_head_without_address_is_a_transient_error(client: WeightClient, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("")
    with pytest.raises(TransientError, match="the head 'head' has no address"):
        await client.fetch_manifest("", None)


async def test_new_file_replaces_the_previous_one(client: WeightClient, servers: Servers, tmp_path: Path) -> None:
    received: list[int] = []
    inodes = set()
    for version in (0, 1):
        path = await client.fetch_file(_manifest(version=version), received.append)
        assert path.read_bytes() == BODY
        inodes.add(path.stat().st_ino)
    await asyncio.sleep(0)  # what the thread has reported last
    assert received[-1] == len(BODY)
    assert list((tmp_path / "scratch").iterdir()) == [path]
    assert len(inodes) == 1, "the memory of the previous one is used again"
    assert servers.tokens == {"Bearer secret"}


async def test_file_of_another_size_replaces_the_previous_one(client: WeightClient, tmp_path: Path) -> None:
    await client.fetch_file(_manifest(), _ignore)
    path = await client.fetch_file(_manifest("small", SMALL, version=1), _ignore)
    assert path.read_bytes() == SMALL
    assert list((tmp_path / "scratch").iterdir()) == [path]


@pytest.fixture
def published(tmp_path: Path) -> WeightManifest:
    """A version whose file is on this machine, and whose URL has none."""
    path = tmp_path / "published"
    path.write_bytes(SMALL)
    status = path.stat()
    local = LocalFile(boot_id=boot_id(), path=str(path), device=status.st_dev, inode=status.st_ino)
    return _manifest("missing", SMALL).model_copy(update={"local": local})


async def test_file_of_the_same_machine_is_read_in_place(
    client: WeightClient, published: WeightManifest, tmp_path: Path
) -> None:
    assert published.local is not None
    publisher = MappedFile(Path(published.local.path))
    for _ in range(2):
        assert await client.fetch_file(published, _ignore) == tmp_path / "published"
        assert not publisher.lock(exclusive=True), "the publisher must not write it while it is read"
        client.release()
        assert publisher.lock(exclusive=True)
        publisher.unlock()
    assert not list((tmp_path / "scratch").iterdir()), "no second copy"


@pytest.mark.parametrize(
    "why",
    ["other machine", "other file", "no file", "written now", "renamed before the lock", "replaced before the lock"],
)
async def test_file_that_is_not_the_announced_one_is_downloaded(
    client: WeightClient, published: WeightManifest, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    assert published.local is not None
    path, local = Path(published.local.path), published.local
    if why == "other machine":
        local = local.model_copy(update={"boot_id": "other"})
    elif why == "other file":
        local = local.model_copy(update={"inode": local.inode + 1})
    elif why == "no file":
        os.unlink(path)
    elif why == "written now":
        assert MappedFile(path).lock(exclusive=True)
    else:
        lock = MappedFile.lock

        def rename_and_lock(file: MappedFile, *, exclusive: bool) -> bool:
            path.rename(path.with_suffix(".partial"))
            if why == "replaced before the lock":
                path.write_bytes(b"other")
            return lock(file, exclusive=exclusive)

        monkeypatch.setattr(MappedFile, "lock", rename_and_lock)
    manifest = published.model_copy(update={"local": local, "url": _manifest("small").url})
    found = await client.fetch_file(manifest, _ignore)
    assert found.parent.name == "scratch"
    assert found.read_bytes() == SMALL


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("other", "expected a file with hash"),
        ("many", "bytes, got"),
        ("short", "bytes, got"),
        ("changed", "chunk 0 has hash"),
        ("cut", "the response ended after|IncompleteRead|ConnectionReset"),
        ("missing", "HTTP 404: no longer kept"),
    ],
)
async def test_partial_or_wrong_file_is_rejected(client: WeightClient, path: str, reason: str) -> None:
    with pytest.raises(TransientError, match=reason):
        await client.fetch_file(_manifest(path), _ignore)


async def test_download_can_be_cancelled_and_another_started(client: WeightClient, tmp_path: Path) -> None:
    stuck = asyncio.create_task(client.fetch_file(_manifest("stuck"), _ignore))
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not list((tmp_path / "scratch").iterdir()):  # noqa: ASYNC110 - a file has no event
            await asyncio.sleep(0.01)
    stuck.cancel()
    await asyncio.wait({stuck})
    assert (await client.fetch_file(_manifest(version=1), _ignore)).read_bytes() == BODY


class Engine:
    """Records the calls; fails at `fails_at`."""

    def __init__(self, fails_at: str = "") -> None:
        self.calls: list[str] = []
        self.fails_at = fails_at
        self.tags: list[list[str]] = []
        self.levels: list[int] = []

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **options: Any) -> Any:
            if name == "wake_up" and self.fails_at != name:
                self.tags.append(args[0])
            if name == "sleep":
                self.levels.append(args[0])
            self.calls.append(" ".join([name, *map(str, options.values()), *(a for a in args if isinstance(a, str))]))
            if name == self.fails_at:
                raise RuntimeError(name)
            return [str(Digest(1, 2)), str(Digest(10, 20))]

        return call


@pytest.fixture(autouse=True)
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        weight_transfer, "_build_update", lambda path, manifest: f"{path or manifest.key} {manifest.digest_unit}"
    )
    monkeypatch.setattr(
        AdapterFolder, "build_request", lambda self, *, reload: f"{self._tensors.parent.name}{' reload' * reload}"
    )


async def test_without_a_file_the_workers_get_the_version_from_their_ranks() -> None:
    engine = Engine()
    await EngineLoader(engine, "keep").load(None, PUBLISHED, _ignore)
    assert "update_weights g:0 word" in engine.calls


async def test_a_failed_update_is_finished_by_the_workers_that_got_theirs() -> None:
    engine = Engine(fails_at="update_weights")
    with pytest.raises(RuntimeError, match="update_weights"):
        await EngineLoader(engine, "keep").load(None, PUBLISHED, _ignore)
    assert engine.calls.index("finish_weight_update") > engine.calls.index("update_weights g:0 word")
    assert not any("rljob_digest" in call for call in engine.calls), "the weights belong to no version"


PUBLISHED = _manifest().model_copy(update={"checksum": str(Digest(11, 22)), "digest_unit": "word"})
"""The replica's digest is the sum over its workers."""
LOAD = [
    "update_weight_version unverified",
    "start_weight_update",
    "update_weights f word",
    "finish_weight_update",
    "collective_rpc rljob_digest",
]


@pytest.mark.parametrize(
    ("update_mode", "pause"), [("keep", "keep False"), ("recompute", "keep True"), ("finish", "wait True")]
)
async def test_load_pauses_in_the_update_mode_and_labels_the_tokens(update_mode: Any, pause: str) -> None:
    engine = Engine()
    loader = EngineLoader(engine, update_mode)
    await loader.load(Path("f"), PUBLISHED, _ignore)
    del engine.calls[:]
    drains: list[bool] = []
    applied = await loader.load(Path("f"), PUBLISHED, drains.append)
    assert drains == ([True, False] if update_mode == "finish" else [False])
    assert engine.calls == [f"pause_generation {pause}", *LOAD, "update_weight_version g:0", "resume_generation"]
    assert (applied.key, applied.file_hash, applied.checksum) == (
        PUBLISHED.key,
        PUBLISHED.file_hash,
        PUBLISHED.checksum,
    )
    assert applied.pause_seconds >= applied.load_seconds >= 0


async def test_first_load_and_one_after_a_failure_clear_the_caches() -> None:
    engine = Engine()
    loader = EngineLoader(engine, "keep")
    for fails_at in ("", "update_weights", ""):
        engine.fails_at = fails_at
        with contextlib.suppress(RuntimeError):
            await loader.load(Path("f"), PUBLISHED, _ignore)
    pauses = [call for call in engine.calls if call.startswith("pause_generation")]
    assert pauses == [
        "pause_generation keep True",  # requests of the start model may have any salt
        "pause_generation keep False",
        "pause_generation abort True",
        "pause_generation keep True",
    ]


@pytest.mark.parametrize("fails_at", ["start_weight_update", "update_weights", "finish_weight_update", "digest"])
async def test_failed_load_aborts_the_requests_and_labels_no_token_with_a_version(fails_at: str) -> None:
    engine = Engine(fails_at)
    published = PUBLISHED.model_copy(update={"checksum": "other"}) if fails_at == "digest" else PUBLISHED
    with pytest.raises((RuntimeError, TransientError)):
        await EngineLoader(engine, "keep").load(Path("f"), published, _ignore)
    assert engine.calls[-2:] == ["pause_generation abort True", "resume_generation"]
    assert [call for call in engine.calls if "version" in call] == ["update_weight_version unverified"]


async def test_engine_is_resumed_if_it_cannot_even_pause() -> None:
    engine = Engine("pause_generation")
    with pytest.raises(RuntimeError):
        await EngineLoader(engine, "keep").load(Path("f"), PUBLISHED, _ignore)
    assert engine.calls[-1] == "resume_generation"


def _write(path: Path, **tensors: float) -> None:
    path.unlink(missing_ok=True)  # as the download of the next version does
    save_file({name: torch.tensor([value]) for name, value in tensors.items()}, path)


async def test_adapter_is_replaced_in_its_slot_and_read_back(tmp_path: Path) -> None:
    engine = Engine()
    published = tmp_path / "g-0.safetensors"
    adapters = build_folders(tmp_path, Lora(rank=4, alpha=8, targetModules=["q_proj"]), 0)
    loader = EngineLoader(engine, "keep", adapters)
    for value in (1.0, 2.0):
        _write(published, q=value)
        await loader.load(published, PUBLISHED, _ignore)
        assert load_file(tmp_path / "0" / "adapter_model.safetensors") == {"q": torch.tensor([value])}
    assert engine.calls[-6:] == [
        "pause_generation keep False",
        "update_weight_version unverified",
        "add_lora 0 reload",
        "collective_rpc rljob_adapter_digest",
        "update_weight_version g:0",
        "resume_generation",
    ]
    config = json.loads((tmp_path / "0" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 4), "the published tensors have the scale already"


async def test_of_several_adapters_those_that_changed_are_replaced_and_all_after_a_failure(tmp_path: Path) -> None:
    engine = Engine()
    published, first, second = tmp_path / "g-0.safetensors", slot_name(1), slot_name(2)
    loader = EngineLoader(engine, "keep", build_folders(tmp_path, Lora(rank=4, targetModules=["q_proj"]), 2))

    async def load(*values: float) -> list[str]:
        del engine.calls[:]
        _write(published, **{f"{first}.q": values[0], f"{second}.q": values[1]})
        with contextlib.suppress(RuntimeError):
            await loader.load(published, PUBLISHED, _ignore)
        return [call.split()[1] for call in engine.calls if call.startswith("add_lora")]

    assert await load(0.0, 0.0) == ["1", "2"]
    assert await load(0.0, 3.0) == ["2"]
    assert load_file(tmp_path / "2" / "adapter_model.safetensors") == {"q": torch.tensor([3.0])}
    engine.fails_at = "add_lora"
    assert await load(5.0, 3.0) == ["1"]
    engine.fails_at = ""
    assert await load(5.0, 3.0) == ["1", "2"], "what the failed update has left is not known"


async def test_cache_wakes_after_the_digest_was_compared() -> None:
    engine = Engine()
    loader = EngineLoader(engine, "keep")
    await loader.load(Path("f"), PUBLISHED, _ignore)
    del engine.calls[:]
    await loader.sleep(2)
    await loader.wake_weights(2)
    await loader.load(Path("f"), PUBLISHED, _ignore)
    assert engine.calls == [
        *("sleep abort", "wake_up", "collective_rpc rljob_fill", "pause_generation keep True", *LOAD),
        *("update_weight_version g:0", "wake_up", "resume_generation"),
    ]
    assert engine.tags == [["weights"], ["kv_cache"]]
    await loader.load(Path("f"), PUBLISHED, _ignore)
    assert len(engine.tags) == 2, "it is awake"


async def test_failed_load_does_not_resume_an_engine_whose_cache_sleeps() -> None:
    engine = Engine()
    loader = EngineLoader(engine, "keep")
    await loader.sleep(2)
    await loader.wake_weights(2)
    for fails_at in ("pause_generation", "update_weights", "wake_up"):
        engine.fails_at = fails_at
        with pytest.raises(RuntimeError):
            await loader.load(Path("f"), PUBLISHED, _ignore)
    assert "resume_generation" not in engine.calls
    engine.fails_at = ""
    await loader.load(Path("f"), PUBLISHED, _ignore)
    assert engine.calls[-2:] == ["wake_up", "resume_generation"]


async def test_weights_that_sleep_on_the_host_are_not_overwritten() -> None:
    engine = Engine()
    loader = EngineLoader(engine, "keep")
    await loader.sleep(1)
    await loader.wake_weights(1)
    assert engine.calls == ["sleep abort", "wake_up"]
    assert engine.levels == [1]


async def test_load_into_an_engine_that_died_can_be_cancelled() -> None:
    class DeadEngine(Engine):
        async def update_weights(self, _: object) -> None:
            self.calls.append("update_weights")
            await asyncio.Event().wait()

    engine = DeadEngine()
    load = asyncio.create_task(EngineLoader(engine, "keep").load(Path("f"), PUBLISHED, _ignore))
    async with asyncio.timeout(DEADLINE_SECONDS):
        while "update_weights" not in engine.calls:  # noqa: ASYNC110 - the condition is any state of the engine
            await asyncio.sleep(0)
    engine.fails_at = "pause_generation"
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load
    assert engine.calls[-1] == "resume_generation"
