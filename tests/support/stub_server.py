"""A server in this process at the port of rewards, for tests of clients. Real HTTP on loopback."""

from __future__ import annotations

from aiohttp import web

from rljob_api.wire.contract import PORT_SERVICE


class StubServer:
    def __init__(self, address):
        self.address = address
        self._runner = None

    def routes(self):
        raise NotImplementedError

    async def start(self):
        app = web.Application()
        app.add_routes(self.routes())
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.address, PORT_SERVICE, reuse_address=True).start()

    async def stop(self):
        if self._runner:
            runner, self._runner = self._runner, None
            await runner.cleanup()
