"""I/O of the weight puller: the head's manifest and the trainer's file over HTTP, and vLLM's engine.

The engine generates during the download, which ends with a complete, verified file or an error. Only `load` pauses the
engine. Invariant: `load` resumes the engine that it paused, even after an error.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from pathlib import Path
from typing import Any, Literal

import aiohttp
from pydantic import ValidationError

from rljob_api.errors import TransientError
from rljob_api.wire import contract
from rljob_api.wire.discovery import resolve
from rljob_api.wire.protocol import WeightManifest
from rljob_trainer.rollout.puller import ApplyResult, Download
from rljob_trainer.weights.checksum import Digest

_POLL_SECONDS = 30
# The head answers within _POLL_SECONDS; the margin allows for a slow head.
_POLL_TIMEOUT = aiohttp.ClientTimeout(total=_POLL_SECONDS + 15, connect=5)
_FILE_TIMEOUT = aiohttp.ClientTimeout(total=None, connect=10, sock_read=60)
_CHUNK_BYTES = 4 << 20


class WeightClient:
    """Gets manifests from the head and files from the trainer, with the job's token."""

    def __init__(self, head: str, token: str, folder: Path) -> None:
        self._head, self._folder = head, folder
        self._session = aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"})

    async def close(self) -> None:
        await self._session.close()

    async def fetch_manifest(self, after: str) -> WeightManifest | None:
        addresses = await asyncio.to_thread(resolve, self._head)
        if not addresses:
            raise TransientError(f"the head {self._head!r} has no address")
        url = f"http://{addresses[0]}:{contract.PORT_DRIVER}{contract.UrlPath.WEIGHTS_CURRENT}"
        params = {"after": after, "timeout": str(_POLL_SECONDS)}
        try:
            async with self._session.get(url, params=params, timeout=_POLL_TIMEOUT) as response:
                if response.status == 204:
                    return None
                if response.status != 200:
                    raise TransientError(f"{url}: status {response.status}: {(await response.text())[:200]}")
                return WeightManifest.model_validate_json(await response.read())
        except (aiohttp.ClientError, TimeoutError, ValidationError) as error:
            raise TransientError(f"{url}: {type(error).__name__}: {error}") from error

    async def fetch_file(self, manifest: WeightManifest) -> Download:
        """Delete the previous file, so that memory holds one, and download the new one."""
        begin = time.perf_counter()
        for old in self._folder.iterdir():
            old.unlink()
        path = self._folder / f"{manifest.generation}-{manifest.version}.safetensors"
        try:
            async with self._session.get(manifest.url, timeout=_FILE_TIMEOUT) as response:
                if response.status != 200:
                    raise TransientError(f"{manifest.url}: status {response.status}")
                with _VerifiedFile(path, manifest) as file:
                    async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                        # In a thread: writing and hashing release the GIL, so the event loop keeps serving.
                        await asyncio.to_thread(file.write, chunk)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise TransientError(f"{manifest.url}: {type(error).__name__}: {error}") from error
        return Download(path, time.perf_counter() - begin)


class _VerifiedFile:
    """A file that gets its final name once its size and sha256 match the manifest."""

    def __init__(self, path: Path, manifest: WeightManifest) -> None:
        self._path, self._manifest = path, manifest
        self._partial = path.with_suffix(".partial")
        self._hash, self._num_bytes = hashlib.sha256(), 0

    def __enter__(self) -> _VerifiedFile:
        self._file = self._partial.open("wb")
        return self

    def write(self, chunk: bytes) -> None:
        self._num_bytes += len(chunk)
        if self._num_bytes > self._manifest.num_bytes:
            raise TransientError(f"{self._manifest.url}: longer than {self._manifest.num_bytes} bytes")
        self._file.write(chunk)
        self._hash.update(chunk)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file.close()
        if kind is None:
            self._verify()
            self._partial.replace(self._path)

    def _verify(self) -> None:
        expected = (self._manifest.num_bytes, self._manifest.sha256)
        got = (self._num_bytes, self._hash.hexdigest())
        if got != expected:
            raise TransientError(f"{self._manifest.url}: expected {expected} (bytes, sha256), got {got}")


class EngineLoader:
    """Loads a file into vLLM's engine, in place."""

    def __init__(self, engine: Any, update_mode: Literal["keep", "finish"]) -> None:
        self._engine = engine
        self._pause_mode = {"keep": "keep", "finish": "wait"}[update_mode]

    async def load(self, path: Path, manifest: WeightManifest) -> ApplyResult:
        engine = self._engine
        begin = time.perf_counter()
        try:
            # Clears the prefix cache. With keep, in-flight requests lose their KV too and recompute it with the new
            # weights, so no token is generated from keys and values of the old ones.
            await engine.pause_generation(mode=self._pause_mode, clear_cache=True)
            if self._pause_mode == "wait":
                begin = time.perf_counter()  # it was generating until now
            load_begin = time.perf_counter()
            await engine.start_weight_update()
            await engine.update_weights(_build_update(path, manifest))
            await engine.finish_weight_update(manifest.key)
            digests = await engine.collective_rpc("rljob_digest")
            load_seconds = time.perf_counter() - load_begin
        finally:
            await engine.resume_generation()
        checksum = sum(map(Digest.parse, digests), start=Digest())
        return ApplyResult(str(checksum), pause_seconds=time.perf_counter() - begin, load_seconds=load_seconds)


def _build_update(path: Path, manifest: WeightManifest) -> Any:
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    return WeightTransferUpdateRequest(update_info={"path": str(path), "sha256": manifest.sha256})
