"""I/O of the weight puller: the head's manifest and the trainer's file over HTTP, and vLLM's engine.

The engine generates during the download, which ends with a complete, verified file or an error. Only `load` pauses the
engine. Invariant: `load` resumes the engine that it paused, even after an error.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
from pydantic import ValidationError

from rljob_api.errors import TransientError
from rljob_api.manifest.roles import UpdateMode
from rljob_api.wire import contract
from rljob_api.wire.discovery import resolve
from rljob_api.wire.protocol import PullReport, RolloutWeights, WeightManifest
from rljob_trainer.rollout.lora import AdapterFolder
from rljob_trainer.weights.checksum import Digest

_POLL_SECONDS = 30
_REPORT_SECONDS = 5
"""Instead, while there is something to report."""
# The head answers within _POLL_SECONDS; the margin allows for a slow head.
_POLL_TIMEOUT = aiohttp.ClientTimeout(total=_POLL_SECONDS + 15, connect=5)
_FILE_TIMEOUT = aiohttp.ClientTimeout(total=None, connect=10, sock_read=60)
_CHUNK_BYTES = 4 << 20

UNVERIFIED = "unverified"
"""Label of tokens from weights of no known version."""
_PAUSES: dict[UpdateMode, tuple[str, bool]] = {
    "keep": ("keep", False),
    "recompute": ("keep", True),
    "finish": ("wait", True),
}
"""vLLM's pause mode, and whether the pause clears the caches: running requests then recompute their keys and values
with the new weights."""


class WeightClient:
    """Gets manifests from the head and files from the trainer, with the job's token."""

    def __init__(self, head: str, token: str, folder: Path) -> None:
        self._head, self._folder = head, folder
        headers = {"Authorization": f"Bearer {token}"}
        self._session = aiohttp.ClientSession(headers=headers, raise_for_status=True)

    async def close(self) -> None:
        await self._session.close()

    async def fetch_manifest(self, after: str, report: PullReport | None) -> WeightManifest | None:
        """Return a manifest other than `after`; None after a timeout. TransientError if the head is unreachable."""
        addresses = await asyncio.to_thread(resolve, self._head)
        if not addresses:
            raise TransientError(f"the head {self._head!r} has no address")
        url = f"http://{addresses[0]}:{contract.PORT_DRIVER}{contract.UrlPath.WEIGHTS_CURRENT}"
        params = {"after": after, "timeout": str(_REPORT_SECONDS if report else _POLL_SECONDS)}
        if report:
            params["report"] = report.model_dump_json()
        try:
            async with self._session.get(url, params=params, timeout=_POLL_TIMEOUT) as response:
                if response.status == 204:
                    return None
                return WeightManifest.model_validate_json(await response.read())
        except (aiohttp.ClientError, TimeoutError, ValidationError) as error:
            raise TransientError(f"{url}: {type(error).__name__}: {error}") from error

    async def fetch_file(self, manifest: WeightManifest, record_received: Callable[[int], None]) -> Path:
        """Delete the previous file, so that memory holds one, and download the new one. It gets its final name once its
        size and sha256 match the manifest. `record_received` gets the number of bytes so far."""
        for old in self._folder.iterdir():
            old.unlink()
        path = self._folder / f"{manifest.generation}-{manifest.version}.safetensors"
        partial = path.with_suffix(".partial")
        async with self._session.get(manifest.url, timeout=_FILE_TIMEOUT) as response:
            received = await _receive(response, partial, record_received)
        expected = (manifest.num_bytes, manifest.sha256)
        if received != expected:
            raise TransientError(f"{manifest.url}: expected {expected} (bytes, sha256), got {received}")
        return partial.replace(path)


async def _receive(
    response: aiohttp.ClientResponse, path: Path, record_received: Callable[[int], None]
) -> tuple[int, str]:
    digest = hashlib.sha256()
    with path.open("wb") as file:

        def write(chunk: bytes) -> None:
            file.write(chunk)
            digest.update(chunk)

        async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
            # In a thread: writing and hashing release the GIL, so the event loop keeps serving.
            await asyncio.to_thread(write, chunk)
            record_received(file.tell())
        return file.tell(), digest.hexdigest()


class EngineLoader:
    """Loads versions into vLLM's engine, and labels the tokens that it samples.

    Invariant: a token is labelled with a version only if the engine's digest is the publisher's; until then, and after
    a failure, with UNVERIFIED.
    """

    def __init__(self, engine: Any, update_mode: UpdateMode, adapter: AdapterFolder | None = None) -> None:
        """`adapter`: where the engine finds the published adapters; None: whole weights are published."""
        self._engine, self._adapter = engine, adapter
        self._pause_mode, self._clears_cache = _PAUSES[update_mode]
        self._is_verified = False
        """Whether everything in the caches is of a published version. Requests are salted with theirs."""

    async def warm_up(self) -> None:
        """Send a first request, which pays for lazy initialization, so that no episode does."""
        from vllm import SamplingParams

        parameters = SamplingParams(max_tokens=2, logprobs=0, ignore_eos=True)
        async for _ in self._engine.generate({"prompt_token_ids": [1, 2, 3]}, parameters, request_id="warm-up"):
            pass

    async def load(
        self, path: Path, manifest: WeightManifest, record_draining: Callable[[bool], None]
    ) -> RolloutWeights:
        """Pause the engine, load the file, and resume. After an exception, the engine's weights are undefined.
        `record_draining` gets True if the pause waits for requests in flight, and False before the load."""
        engine = self._engine
        begin = time.perf_counter()
        try:
            if self._pause_mode == "wait":
                record_draining(True)
            await engine.pause_generation(
                mode=self._pause_mode, clear_cache=self._clears_cache or not self._is_verified
            )
            if self._pause_mode == "wait":
                begin = time.perf_counter()  # it was generating until now
            record_draining(False)
            load_begin = time.perf_counter()
            self._is_verified = False
            await engine.update_weight_version(UNVERIFIED)
            checksum = str(sum(map(Digest.parse, await self._replace(path)), start=Digest()))
            if checksum != manifest.checksum:
                raise TransientError(f"the engine's digest is {checksum}, the publisher's {manifest.checksum}")
            await engine.update_weight_version(manifest.key)
            self._is_verified = True
            load_seconds = time.perf_counter() - load_begin
        except BaseException:
            # The requests would continue with undefined weights.
            await engine.pause_generation(mode="abort", clear_cache=True)
            raise
        finally:
            await engine.resume_generation()
        return RolloutWeights(
            generation=manifest.generation,
            version=manifest.version,
            sha256=manifest.sha256,
            checksum=checksum,
            pause_seconds=time.perf_counter() - begin,
            load_seconds=load_seconds,
        )

    async def _replace(self, path: Path) -> list[str]:
        """Replace the weights, or the adapter. Return the digest of each worker's part."""
        engine = self._engine
        if self._adapter is not None:
            self._adapter.place(path)
            await engine.add_lora(self._adapter.build_request(reload=True))
            return await engine.collective_rpc("rljob_adapter_digest")
        await engine.start_weight_update()
        await engine.update_weights(_build_update(path))
        await engine.finish_weight_update()
        return await engine.collective_rpc("rljob_digest")


def _build_update(path: Path) -> Any:
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    return WeightTransferUpdateRequest(update_info={"path": str(path)})
