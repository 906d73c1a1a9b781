"""The real server with a model, before a vLLM that is played: what is asked of it, and when the server is ready."""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from rljob_api.wire.contract import ExitCode
from tests.support.reward_process import Server, wait_for

_numbers = itertools.count(1)


async def _answer_health(request: web.Request) -> web.Response:
    return web.Response()


class Vllm:
    """Answers /health and /classify on a Unix socket, as vLLM does, in its own thread."""

    def __init__(self, socket: str, outputs: list[float]) -> None:
        self.outputs = outputs
        self.status = 200
        self.requests: list[dict[str, Any]] = []
        self._socket = socket
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._started.wait(30)

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(30)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.router.add_get("/health", _answer_health)
        app.router.add_post("/classify", self._classify)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
        self._loop.run_until_complete(runner.setup())
        self._loop.run_until_complete(web.UnixSite(runner, self._socket).start())
        self._started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())

    async def _classify(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        if self.status != 200:
            return web.json_response({"error": {"message": "too long: 4000 tokens"}}, status=self.status)
        data = [{"index": 0, "label": "L", "probs": self.outputs, "num_classes": len(self.outputs)}]
        return web.json_response({"data": data, "usage": {"prompt_tokens": 12}})


class Started:
    """A server and the vLLM beside it."""

    def __init__(self, folder: Path, socket: str, **model: Any) -> None:
        reward = {"name": "test", "model": {"source": "/m", **model}, "timeoutSeconds": 5}
        (folder / "reward.yaml").write_text(yaml.safe_dump(reward))
        self.socket = socket
        self.vllm: Vllm | None = None
        host = f"127.77.{1 + os.getpid() % 200}.{next(_numbers) % 250 + 1}"
        self.server = Server(folder, host, ["--grace", "2"], {"RLJOB_VLLM_SOCKET": socket})

    def begin_vllm(self, *outputs: float) -> Vllm:
        Path(self.socket).unlink(missing_ok=True)
        self.vllm = Vllm(self.socket, list(outputs))
        return self.vllm


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    running: list[Started] = []
    with tempfile.TemporaryDirectory(prefix="rm-") as short:  # a socket's path must be short

        def start(**model: Any) -> Started:
            running.append(Started(tmp_path, f"{short}/socket", **model))
            return running[-1]

        yield start
        for started in running:
            started.server.stop()
            if started.vllm:
                started.vllm.close()


def test_the_server_is_ready_with_its_vllm_and_not_without(start):
    started = start()
    wait_for(lambda: "waiting for vLLM" in started.server.log.read_text(), "the server to wait")
    assert not started.server.is_ready()
    vllm = started.begin_vllm(0.5)
    wait_for(started.server.is_ready, "the server to be ready")
    result = started.server.score("four")
    assert (result["score"], result["valid"]) == (0.5, True)
    asked = vllm.requests[-1]
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "four"}]
    assert asked["messages"] == turns
    assert asked["use_activation"] is False
    assert "truncation_side" not in asked, "a text loses tokens only where tooLong says so"
    vllm.close()
    wait_for(lambda: not started.server.is_ready(), "the server to be unready")
    result = started.server.score("five")
    assert (result["valid"], result["reason"]) == (False, "exception"), result
    started.begin_vllm(0.25)
    wait_for(started.server.is_ready, "the server to be ready again")
    assert started.server.score("six")["score"] == 0.25


def test_text_label_activation_and_truncation_are_as_told(start):
    started = start(template="text", label=1, activation="softmax", tooLong="truncateLeft")
    vllm = started.begin_vllm(0.0, 0.0)
    wait_for(started.server.is_ready, "the server to be ready")
    assert started.server.score("four")["score"] == 0.5
    asked = vllm.requests[-1]
    assert asked["input"] == "2+2?four"
    assert (asked["truncation_side"], asked["truncate_prompt_tokens"]) == ("left", -1)
    vllm.status = 400
    result = started.server.score("x" * 100)
    assert result["reason"] == "exception"
    assert "too long: 4000 tokens" in result["message"]


def test_several_outputs_without_a_label_stop_the_server_at_its_start(start):
    started = start()
    started.begin_vllm(0.1, 0.2, 0.3)
    assert started.server.process.wait(60) == ExitCode.USER
    assert "model.label must be set: the model has 3 outputs" in started.server.log.read_text()
