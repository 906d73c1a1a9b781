"""An HTTP server in a thread with its own event loop, so that large files do not delay the loop of the caller."""

import asyncio
import hmac
import threading
from collections.abc import Coroutine
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

_SHUTDOWN_SECONDS = 1.0


class ServerThread:
    """Serves from construction to close()."""

    def __init__(self, app: web.Application, host: str, port: int) -> None:
        """Raise OSError if the port is in use."""
        self._loop = asyncio.new_event_loop()
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS)
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"server-{port}", daemon=True)
        self._thread.start()
        try:
            self._run(self._serve(host, port))
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        self._run(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _serve(self, host: str, port: int) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port, reuse_address=True).start()


def require_token(token: str) -> Middleware:
    """Reject every request without the job's token."""

    @web.middleware
    async def authorize(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(given, f"Bearer {token}".encode()):
            raise web.HTTPUnauthorized(text="the job's token is required")
        return await handler(request)

    return authorize
