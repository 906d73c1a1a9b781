"""A fake vLLM on a Unix socket, with /health, /classify and chats, in a thread."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from aiohttp import web

from tests.support.fake_endpoint import completion
from tests.support.waiting import DEADLINE_SECONDS


class FakeVllm:
    """Answers every classification with `outputs`, or with `status`, and every chat with `Hi.`."""

    def __init__(self, socket: str, *outputs: float) -> None:
        self.outputs = list(outputs)
        self.status = 200
        self.requests: list[dict[str, Any]] = []
        self._socket = socket
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._started.wait(DEADLINE_SECONDS)

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(DEADLINE_SECONDS)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_post("/classify", self._classify)
        app.router.add_post("/v1/chat/completions", self._chat)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
        self._loop.run_until_complete(runner.setup())
        self._loop.run_until_complete(web.UnixSite(runner, self._socket).start())
        self._started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _chat(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        return completion("Hi.")

    async def _classify(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        if self.status != 200:
            return web.json_response({"error": {"message": "too long: 4000 tokens"}}, status=self.status)
        data = [{"index": 0, "label": "L", "probs": self.outputs, "num_classes": len(self.outputs)}]
        return web.json_response({"data": data, "usage": {"prompt_tokens": 12}})
