"""The head's side of files that ranks send: what a rank writes to a checkpoint or an export, and reads back; and of
those that `rljob ui`, `report`, `trajectories` and `export` read of a job in a cluster.

Invariants: a file under its own name is complete, with the bytes that the rank has sent, on the disk; a request writes
nothing outside of a checkpoint's trainer folder and of an unfinished export, and reads, besides, only what reports
need, checkpoints and exports; memory holds one chunk of each request.
"""

import asyncio
import logging
import os
import re
import secrets
import zlib
from pathlib import Path

from aiohttp import StreamReader, web

from rljob_api.errors import TransientError, UserError
from rljob_api.run.files import PARAMETER_STEP, describe_files, find_model, is_model_file, list_run_files
from rljob_api.run.folder import FILE_JOB
from rljob_api.wire.contract import PORT_RUN_FILES, RUN_ROUTE
from rljob_api.wire.discovery import listening_port
from rljob_trainer.run_folder.client import EXPORT_PARTIAL, RunFolder, read_run_id
from rljob_trainer.server_thread import ServerThread, require_token

log = logging.getLogger(__name__)

_ALLOWED = re.compile(rf"(checkpoints/step-\d{{6,}}/trainer|{re.escape(EXPORT_PARTIAL)})(/(?!\.\.?(/|$))[\w.\-]+)+")
_CHUNK_BYTES = 1 << 20


class RunFileServer:
    """Serves from construction to close()."""

    def __init__(
        self, run_dir: Path, host: str, token: str, job_file: Path | None = None, *, is_read_only: bool = False
    ) -> None:
        """`job_file`: None, if it is in the folder. `is_read_only`: no rank writes. Raise TransientError if the port is
        in use."""
        self._run_dir, self._job_file = run_dir, job_file or run_dir / FILE_JOB
        port = listening_port(PORT_RUN_FILES)
        self.folder = RunFolder(run_dir, read_run_id(run_dir), f"http://{host}:{port}{RUN_ROUTE}")
        app = web.Application(middlewares=[require_token(token)])
        if not is_read_only:
            app.router.add_put(f"{RUN_ROUTE}/{{path:.+}}", self._put)
        app.router.add_get(f"{RUN_ROUTE}/", self._list)
        app.router.add_get(f"{RUN_ROUTE}/{{path:.+}}", self._get)
        try:
            self._server = ServerThread(app, host, port)
        except OSError as error:
            raise TransientError(f"cannot serve the run's files on {host}:{port}: {error}") from error

    def close(self) -> None:
        self._server.close()

    async def _put(self, request: web.Request) -> web.Response:
        """Write the body to a file. Return its length and CRC-32, which the rank compares with its own."""
        path = self._find(request)
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
        try:
            received = await _receive(request.content, partial)
            await asyncio.to_thread(partial.replace, path)
        except OSError as error:
            log.warning("cannot write %s: %s", path, error)
            # To the end: a rank that still sends would not read the answer.
            async for _ in request.content.iter_chunked(_CHUNK_BYTES):
                pass
            raise web.HTTPInsufficientStorage(text=f"{path}: {error.strerror}") from error
        finally:
            partial.unlink(missing_ok=True)
        return web.json_response(received)

    async def _list(self, request: web.Request) -> web.Response:
        if PARAMETER_STEP in request.query:
            return await self._find_model(request.query[PARAMETER_STEP])
        files = await asyncio.to_thread(lambda: describe_files(list_run_files(self._run_dir, self._job_file)))
        return web.json_response([file.model_dump() for file in files])

    async def _get(self, request: web.Request) -> web.StreamResponse:
        readable = await asyncio.to_thread(list_run_files, self._run_dir, self._job_file)
        name = request.match_info["path"]
        path = readable.get(name) or (self._run_dir / name if is_model_file(name) else self._find(request))
        if not path.is_file():
            raise web.HTTPNotFound(text=f"{path} does not exist")
        return web.FileResponse(path)  # also for a Range

    async def _find_model(self, name: str) -> web.Response:
        if name not in ("last", "best") and not name.isdecimal():
            raise web.HTTPBadRequest(text=f"{name!r} is no step")
        try:
            found = await asyncio.to_thread(find_model, self._run_dir, name)
        except UserError as error:
            raise web.HTTPNotFound(text=str(error)) from error
        return web.json_response(found.model_dump())

    def _find(self, request: web.Request) -> Path:
        name = request.match_info["path"]
        if not _ALLOWED.fullmatch(name):
            raise web.HTTPForbidden(text=f"{name!r} is not a file that a rank writes")
        return self._run_dir / name


async def _receive(content: StreamReader, path: Path) -> tuple[int, int]:
    """Write the content durably. Return the number of bytes and their CRC-32."""
    path.parent.mkdir(parents=True, exist_ok=True)
    checksum = 0
    with path.open("wb") as file:

        def write(chunk: bytes) -> None:
            nonlocal checksum
            file.write(chunk)
            checksum = zlib.crc32(chunk, checksum)

        def finish() -> None:
            file.flush()
            os.fsync(file.fileno())

        async for chunk in content.iter_chunked(_CHUNK_BYTES):
            # In a thread: writing and the checksum release the GIL, so that other ranks are served.
            await asyncio.to_thread(write, chunk)
        await asyncio.to_thread(finish)
        return file.tell(), checksum
