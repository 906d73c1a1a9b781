"""The middleware that watches the engine of a sidecar."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from rljob_api.manifest.job_sections import HangDetection
from rljob_trainer.liveness.judge import Hang
from rljob_trainer.rollout import engine_watch, sidecar
from rljob_trainer.rollout.engine_watch import build_watch, end_if_it_hangs
from rljob_trainer.rollout.sidecar import SidecarWatch


class Watch:
    """Stands for the watch of the engine."""

    def __init__(self) -> None:
        self.reason, self.hangs = "", asyncio.Event()

    def reason_silent(self) -> str:
        return self.reason

    async def run(self) -> Hang:
        await self.hangs.wait()
        return Hang("an answer without requests", 61.0, 60.0)


class Server:
    """vLLM's server, behind the middleware."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.watch, self.engines = Watch(), list[Any]()
        self.bounds: HangDetection | None = None
        self.ended = asyncio.get_running_loop().create_future()

        def build(read_bounds: Any, engine: Any) -> Watch:
            self.bounds = read_bounds()
            self.engines.append(engine)
            return self.watch

        async def end(watch: Watch) -> None:
            self.ended.set_result(await watch.run())

        monkeypatch.setattr(sidecar, "build_watch", build)
        monkeypatch.setattr(sidecar, "end_if_it_hangs", end)
        self.middleware = SidecarWatch(self.respond)

    async def respond(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})

    async def begin(self, **state: Any) -> None:
        await self.middleware({"type": "lifespan", "app": SimpleNamespace(state=SimpleNamespace(**state))}, None, None)  # type: ignore[arg-type]

    async def get(self, path: str) -> int:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        await self.middleware({"type": "http", "path": path}, None, send)  # type: ignore[arg-type]
        return int(sent[0]["status"])


@pytest_asyncio.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    yield Server(monkeypatch)


async def test_health_is_the_engines_word_and_at_the_limit_the_sidecar_ends(server: Server) -> None:
    await server.begin(engine_client="engine")
    assert server.engines == ["engine"]
    assert await server.get("/health") == 200
    server.watch.reason = "the engine owes an answer without requests for 40 s"
    assert (await server.get("/health"), await server.get("/pooling")) == (503, 200)
    server.watch.hangs.set()
    assert (await server.ended).limit_seconds == 60.0


async def test_a_server_without_an_engine_is_left_alone(server: Server) -> None:
    await server.begin()
    assert (server.engines, await server.get("/health")) == ([], 200)


async def test_a_reward_model_has_the_default_bounds(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    await server.begin(engine_client="engine")
    assert server.bounds == HangDetection()
    monkeypatch.setenv("RLJOB_HANG_DETECTION", '{"minSeconds": 5, "maxSeconds": 60}')
    await server.begin(engine_client="engine")
    assert server.bounds == HangDetection(min_seconds=5, max_seconds=60)


async def test_a_hung_engine_is_told_to_the_head_before_its_processes_end(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[Any] = []

    class EndError(Exception):
        """The process ends."""

    def end(code: int) -> None:
        order.append(code)
        raise EndError

    async def tell(head: str, token: str, part: Any) -> None:
        order.append((head, token, part.role, part.name, part.doing))

    monkeypatch.setenv("RLJOB_HEAD", "head")
    monkeypatch.setenv("RLJOB_TOKEN", "secret")
    monkeypatch.setattr(engine_watch, "report_hang", tell)
    monkeypatch.setattr(engine_watch, "log_stacks", lambda: ["process 7 is stopped: it gives no stacks"])
    monkeypatch.setattr(engine_watch, "end_children", lambda: order.append("the engine's processes are killed"))
    monkeypatch.setattr(engine_watch, "end_program", lambda message, code: code)
    monkeypatch.setattr(engine_watch.os, "_exit", end)
    watch: Any = Watch()
    watch.hangs.set()
    with pytest.raises(EndError):
        await end_if_it_hangs(watch, "trainer", "engine of spec.rewards[0].model at 10.0.0.7:8001")
    doing = "owes an answer without requests; process 7 is stopped: it gives no stacks"
    told = ("head", "secret", "trainer", "engine of spec.rewards[0].model at 10.0.0.7:8001", doing)
    assert order == [told, "the engine's processes are killed", 75]


async def test_the_watch_asks_the_engine_and_counts_what_it_puts_out() -> None:
    processor = SimpleNamespace(process_outputs=lambda outputs: None, has_unfinished_requests=lambda: True)

    async def is_sleeping() -> bool:
        return False

    watch = build_watch(HangDetection, SimpleNamespace(output_processor=processor, is_sleeping=is_sleeping))
    assert await watch.check(1.0) == ""
