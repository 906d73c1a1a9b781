"""A fake OpenAI-compatible endpoint, with answers and faults set by tests."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from tests.support.waiting import DEADLINE_SECONDS

Answer = Callable[[dict[str, Any], int], Awaitable[web.Response] | web.Response]
"""(body of the request, its index from 0) -> response."""


def completion(text: str | None, **changes: Any) -> web.Response:
    """Return a chat completion."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop", **changes}
    usage = {"prompt_tokens": 70, "completion_tokens": 30}
    return web.json_response({"object": "chat.completion", "choices": [choice], "usage": usage})


async def nothing(body: dict[str, Any], number: int) -> web.Response:
    """Never answer."""
    await asyncio.Event().wait()
    raise AssertionError


class Endpoint:
    """Runs in a thread. Answers with `answer`, which tests set, and records requests and their concurrency."""

    def __init__(self, host: str, port: int = 9000) -> None:
        self.host, self.port = host, port
        self.url = f"http://{host}:{port}/v1"
        self.answer: Answer = lambda body, number: completion("Score: 1")
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.headers: list[dict[str, str]] = []
        self.at: list[float] = []
        self.in_flight = self.max_in_flight = 0
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._started.wait(DEADLINE_SECONDS)

    def reset(self, answer: Answer) -> None:
        self.answer = answer
        self.requests, self.keys, self.headers, self.at = [], [], [], []
        self.max_in_flight = self.in_flight

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_SECONDS)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._post)
        app.router.add_post("/v1/completions", self._post)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0, handler_cancellation=True)
        self._loop.run_until_complete(runner.setup())
        self._loop.run_until_complete(web.TCPSite(runner, self.host, self.port).start())
        self._started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())

    async def _post(self, request: web.Request) -> web.Response:
        number = len(self.requests)
        self.requests.append(json.loads(await request.read()))
        self.keys.append(request.headers.get("Authorization"))
        self.headers.append(dict(request.headers))
        self.at.append(self._loop.time())
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            answer = self.answer(self.requests[-1], number)
            return answer if isinstance(answer, web.Response) else await answer
        finally:
            self.in_flight -= 1
