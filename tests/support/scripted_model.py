"""A chat completions endpoint that gives scripted answers: each API key has its own list, and its own place in it."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

_numbers = itertools.count(1)


class ScriptedModel:
    """After the last answer of a key: 400 with the code turn_limit, as the gateway does."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        """Bodies, in order."""
        self._answers: dict[str, Iterator[str | dict[str, Any]]] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._build_handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def script(self, answers: Sequence[str | dict[str, Any]]) -> str:
        """Return a key that gives these answers: texts, or fields of an assistant message."""
        key = f"sk-test-{next(_numbers)}"
        self._answers[key] = iter(answers)
        return key

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, key: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.requests.append(body)
        answer = next(self._answers[key], None)
        if answer is None:
            return 400, {"error": {"message": "the episode has no turns left", "code": "turn_limit"}}
        message = {"role": "assistant"} | ({"content": answer} if isinstance(answer, str) else answer)
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason, "logprobs": None}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        named = {"id": f"chatcmpl-{next(_numbers)}", "object": "chat.completion", "created": 1, "model": "policy"}
        return 200, {**named, "choices": [choice], "usage": usage}

    def _build_handler(model) -> type[BaseHTTPRequestHandler]:  # noqa: N805
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                key = self.headers["authorization"].removeprefix("Bearer ")
                status, reply = model._answer(key, body)
                is_stream = body.get("stream", False) and status == 200
                content = _stream(reply) if is_stream else json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("content-type", "text/event-stream" if is_stream else "application/json")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler


def _stream(reply: dict[str, Any]) -> bytes:
    """Return a completion as the events of a stream: the whole answer in one."""
    choice = reply["choices"][0]
    delta = dict(choice["message"])
    if delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(delta["tool_calls"])]
    shared = {key: reply[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    chunks = [
        {**shared, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**shared, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
        {**shared, "choices": [], "usage": reply["usage"]},
    ]
    return b"".join(b"data: %s\n\n" % json.dumps(chunk).encode() for chunk in chunks) + b"data: [DONE]\n\n"


@pytest.fixture(scope="module")
def scripted_model() -> Iterator[ScriptedModel]:
    model = ScriptedModel()
    yield model
    model.close()
