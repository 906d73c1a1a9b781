"""The publisher's side of weights: writes each version once as safetensors and serves the file over HTTP.

Owns the files and their digests; leaves it to the caller to gather and cast the tensors (to the wire dtype, tied ones
once) and to announce the manifest. A file that can be asked for is complete, and the newest two stay, so a rollout
that began with the version before the newest still ends well.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import threading
from collections.abc import Mapping
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
    """A file server in a thread of its own. Use: start(), publish(...) for each version, close()."""

    def __init__(self, host: str, token: str, *, port: int = PORT_WEIGHTS, folder: Path | None = None) -> None:
        self._host, self._port, self._token = host, port, token
        self._folder = folder or open_scratch_folder()
        self._published: list[Path] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="weight-store", daemon=True)
        self._started = threading.Event()
        self._failure: BaseException | None = None

    def start(self) -> None:
        """Serve until close(). Raises where the port cannot be had."""
        self._thread.start()
        if not self._started.wait(_START_TIMEOUT_SECONDS) or self._failure:
            raise TransientError(f"cannot serve weights on {self._host}:{self._port}: {self._failure}")

    def close(self) -> None:
        """Stop serving and remove the files."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        for path in self._published:
            path.unlink(missing_ok=True)
        self._published.clear()

    def publish(self, weights: Mapping[str, Tensor] | Path, generation: str, version: int) -> WeightManifest:
        """Write a version and make it available; the manifest is for the head to announce."""
        if not re.fullmatch(r"[A-Za-z0-9._-]+", generation):
            raise ValueError(f"generation must be of letters, digits, '.', '_' and '-', got {generation!r}")
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
            raise web.HTTPUnauthorized(text="needs the job's token")
        return await handler(request)

    async def _get_file(self, request: web.Request) -> web.StreamResponse:
        # Only names that were published: what the URL says is never joined to a folder.
        for path in self._published:
            if path.name == request.match_info["name"]:
                return web.FileResponse(path)
        raise web.HTTPNotFound(text="no such version, or no longer kept: ask the head for the current one")


def _without_ties(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tied names share memory, which safetensors cannot hold; the first name stands for all."""
    first_names = {memory_key(tensor): name for name, tensor in reversed(list(weights.items()))}
    if not first_names:
        raise ValueError("there are no weights to publish")
    return {name: weights[name].detach().contiguous() for name in weights if name in set(first_names.values())}


def _digest_file_and_tensors(path: Path, tensors: Mapping[str, Tensor]) -> tuple[str, str]:
    """sha256 of the file and digest of the parameters, at the same time: both leave the interpreter's lock."""
    digests: list[str] = []

    def hash_file() -> None:
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())

    hashing = threading.Thread(target=hash_file)
    hashing.start()
    checksum = str(digest_tensors(tensors.values()))
    hashing.join()
    return digests[0], checksum
