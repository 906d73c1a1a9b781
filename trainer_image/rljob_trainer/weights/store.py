"""The publisher's side of weights: writes each version once as safetensors, and serves the file over HTTP.

The caller gathers and casts the tensors (to the wire dtype, tied ones once) and announces the manifest. A file that can
be requested is complete. The newest two are kept, so that a rollout can finish downloading the previous version.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler
from safetensors.torch import save_file
from torch import Tensor

from rljob_api.errors import TransientError
from rljob_api.wire.contract import PORT_WEIGHTS
from rljob_api.wire.protocol import WeightManifest
from rljob_trainer.weights.checksum import digest_tensors, memory_key
from rljob_trainer.weights.scratch import open_scratch_folder

_NUM_KEPT = 2
_SHUTDOWN_SECONDS = 1.0


class WeightStore:
    """A file server in a separate thread, from construction to close()."""

    def __init__(self, host: str, token: str) -> None:
        """Raise TransientError if the port is in use."""
        self._address, self._token = f"{host}:{PORT_WEIGHTS}", token
        self._folder = open_scratch_folder()
        self._published: list[Path] = []
        self._loop = asyncio.new_event_loop()
        app = web.Application(middlewares=[self._authorize])
        app.router.add_get("/weights/{name}", self._get_file)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS)
        self._thread = threading.Thread(target=self._loop.run_forever, name="weight-store", daemon=True)
        self._thread.start()
        try:
            self._run(self._serve(host))
        except OSError as error:
            self.close()
            raise TransientError(f"cannot serve weights on {self._address}: {error}") from error

    def close(self) -> None:
        self._run(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        for path in self._published:
            path.unlink(missing_ok=True)

    def publish(self, weights: Mapping[str, Tensor], generation: str, version: int) -> WeightManifest:
        """Write a version, make it available, and return the manifest for the head to announce."""
        path = self._folder / f"{generation}-{version}.safetensors"
        tensors = _without_ties(weights)
        partial = path.with_suffix(".partial")
        save_file(tensors, partial)
        partial.replace(path)
        sha256, checksum = _digest_file_and_tensors(path, tensors)
        published = [*self._published, path]
        self._published = published[-_NUM_KEPT:]
        for old in published[:-_NUM_KEPT]:
            old.unlink()
        return WeightManifest(
            generation=generation,
            version=version,
            url=f"http://{self._address}/weights/{path.name}",
            num_bytes=path.stat().st_size,
            sha256=sha256,
            checksum=checksum,
        )

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _serve(self, host: str) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, host, PORT_WEIGHTS, reuse_address=True).start()

    @web.middleware
    async def _authorize(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            raise web.HTTPUnauthorized(text="the job's token is required")
        return await handler(request)

    async def _get_file(self, request: web.Request) -> web.StreamResponse:
        # Serve published files only: never join the URL to a folder.
        for path in self._published:
            if path.name == request.match_info["name"]:
                return web.FileResponse(path)
        raise web.HTTPNotFound(text="version not found, or no longer kept; get the current one from the head")


def _without_ties(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Keep the first of tied names: safetensors cannot store shared memory."""
    first_names: dict[object, str] = {}
    for name, tensor in weights.items():
        first_names.setdefault(memory_key(tensor), name)
    return {name: weights[name].detach().contiguous() for name in first_names.values()}


def _digest_file_and_tensors(path: Path, tensors: Mapping[str, Tensor]) -> tuple[str, str]:
    """Return the file's sha256 and the parameters' digest. Both release the GIL, so they run in parallel."""
    with ThreadPoolExecutor(1) as executor, path.open("rb") as file:
        sha256 = executor.submit(hashlib.file_digest, file, "sha256")
        checksum = str(digest_tensors(tensors.values()))
        return sha256.result().hexdigest(), checksum
