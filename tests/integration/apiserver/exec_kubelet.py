"""A kubelet that serves only exec: it runs the command on this machine, with a folder in place of the claim.

The API server proxies the client's WebSocket to it, so the protocol is the client's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import threading
from pathlib import Path
from types import TracebackType

from aiohttp import WSMsgType, web

from rljob_cluster.control_plane.pki import Pki
from tests.support.waiting import DEADLINE_SECONDS

_PROTOCOL = "v4.channel.k8s.io"


class ExecKubelet:
    """`with ExecKubelet(folder, address, claim) as kubelet` listens on kubelet.port until it ends."""

    def __init__(self, folder: Path, address: str, claim: Path) -> None:
        self.address, self.claim, self.port = address, claim, 0
        self.commands: list[list[str]] = []
        self._started = threading.Event()
        pki = Pki(folder)
        pki.build_ca()
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(*pki.certificate("kubelet", "kubelet", hosts=[address]))
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)

    def __enter__(self) -> ExecKubelet:
        self._thread.start()
        assert self._started.wait(DEADLINE_SECONDS), "the kubelet did not start"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, t: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self) -> None:
        app = web.Application()
        app.router.add_get("/exec/{namespace}/{pod}/{container}", self._execute)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, self.address, 0, ssl_context=self._context)
        await site.start()
        self.port = runner.addresses[0][1]
        self._started.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _execute(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(protocols=(_PROTOCOL,))
        await socket.prepare(request)
        for channel in range(4):
            await socket.send_bytes(bytes([channel]))
        self.commands.append(request.query.getall("command"))
        command = [part.replace("/claim", str(self.claim)) for part in self.commands[-1]]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.STDOUT
        )
        feeder = asyncio.create_task(_feed(socket, process))
        assert process.stdout is not None
        output = await process.stdout.read()
        code = await process.wait()
        feeder.cancel()
        if output:
            await socket.send_bytes(b"\x01" + output)
        cause = {"reason": "ExitCode", "message": str(code)}
        status = {"status": "Failure", "details": {"causes": [cause]}} if code else {"status": "Success"}
        await socket.send_bytes(b"\x03" + json.dumps(status).encode())
        await socket.close()
        return socket


async def _feed(socket: web.WebSocketResponse, process: asyncio.subprocess.Process) -> None:
    """Pass stdin on, and never close it, as the kubelet with this protocol."""
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):
        async for message in socket:
            if message.type is WSMsgType.BINARY and message.data[:1] == b"\x00":
                process.stdin.write(message.data[1:])
                await process.stdin.drain()
