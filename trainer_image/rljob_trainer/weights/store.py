"""The publisher's side of weights: writes each version once as safetensors, and serves the file over HTTP.

Owns the files and their digests. The caller gathers and casts the tensors (to the wire dtype, tied ones once) and
announces the manifest. A file that can be requested is complete. The newest two are kept, so that a rollout can finish
downloading the previous version.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler
from safetensors.torch import load_file, save_file
from torch import Tensor

from rljob_api.errors import TransientError
from rljob_api.wire.contract import PORT_WEIGHTS
from rljob_api.wire.protocol import WeightManifest
from rljob_trainer.weights.checksum import digest_tensors, memory_key
from rljob_trainer.weights.scratch import open_scratch_folder

_NUM_KEPT = 2
_START_TIMEOUT_SECONDS = 30
_SHUTDOWN_SECONDS = 1.0


class WeightStore:
    """A file server in a separate thread. Usage: start(), publish(...) for each version, close()."""

    def __init__(self, host: str, token: str, *, port: int = PORT_WEIGHTS, folder: Path | None = None) -> None:
        self._host, self._port, self._token = host, port, token
        self._folder = folder or open_scratch_folder()
        self._published: list[Path] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="weight-store", daemon=True)
        self._started = threading.Event()
        self._failure: BaseException | None = None

    def start(self) -> None:
        """Serve until close(). Raise TransientError if the port is in use."""
        self._thread.start()
        if not self._started.wait(_START_TIMEOUT_SECONDS) or self._failure:
            raise TransientError(f"cannot serve weights on {self._host}:{self._port}: {self._failure}")

    def close(self) -> None:
        """Stop serving, and delete the files."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        for path in self._published:
            path.unlink(missing_ok=True)
        self._published.clear()

    def publish(self, weights: Mapping[str, Tensor] | Path, generation: str, version: int) -> WeightManifest:
        """Write a version, make it available, and return the manifest for the head to announce."""
        if not re.fullmatch(r"[A-Za-z0-9._-]+", generation):
            raise ValueError(f"generation must consist of letters, digits, '.', '_' and '-', got {generation!r}")
        path = self._folder / f"{generation}-{version}.safetensors"
        tensors = load_file(weights) if isinstance(weights, Path) else _without_ties(weights)
        partial = path.with_suffix(".partial")
        save_file(tensors, partial)
        partial.replace(path)
        sha256, checksum = _digest_file_and_tensors(path, tensors)
        self._keep(path)
        return WeightManifest(
            generation=generation,
            version=version,
            url=f"http://{self._host}:{self._port}/weights/{path.name}",
            num_bytes=path.stat().st_size,
            sha256=sha256,
            checksum=checksum,
        )

    def _keep(self, path: Path) -> None:
        self._published = [*(old for old in self._published if old != path), path]
        for old in self._published[:-_NUM_KEPT]:
            old.unlink(missing_ok=True)
        self._published = self._published[-_NUM_KEPT:]

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        runner = web.AppRunner(self._build_app(), access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS)
        try:
            self._loop.run_until_complete(runner.setup())
            site = web.TCPSite(runner, self._host, self._port, reuse_address=True)
            self._loop.run_until_complete(site.start())
        except OSError as error:
            self._failure = error
            return
        finally:
            self._started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    def _build_app(self) -> web.Application:
        app = web.Application(middlewares=[self._authorize])
        app.router.add_get("/weights/{name}", self._get_file)
        return app

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
    first_names = {memory_key(tensor): name for name, tensor in reversed(list(weights.items()))}
    if not first_names:
        raise ValueError("no weights to publish")
    return {name: weights[name].detach().contiguous() for name in weights if name in set(first_names.values())}


def _digest_file_and_tensors(path: Path, tensors: Mapping[str, Tensor]) -> tuple[str, str]:
    """Return the file's sha256 and the parameters' digest. Both release the GIL, so they run in parallel."""
    with ThreadPoolExecutor(1) as executor, path.open("rb") as file:
        sha256 = executor.submit(hashlib.file_digest, file, "sha256")
        checksum = str(digest_tensors(tensors.values()))
        return sha256.result().hexdigest(), checksum
