"""The client of the policy against a real HTTP server: one connection, repeated requests, refusals."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rljob_service.worker.environments.base import RefusedError
from rljob_service.worker.environments.model import GONE, ChatModel, GatewayError, is_limit
from rljob_service.worker.episodes.types import Access

ANSWER = {"id": "c-1", "choices": [{"message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]}
PROMPT = [{"role": "user", "content": "?"}]
Reply = tuple[int, Any, dict[str, str]]


class Endpoint:
    """Gives its replies in order, the last one again and again. A status of 0 closes the connection instead."""

    def __init__(self, *replies: Reply) -> None:
        self.requests: list[tuple[int, str, dict[str, str], dict[str, Any]]] = []
        """[(port of the client, path, headers, body)]"""
        endpoint, remaining = self, list(replies)

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                headers = {key.lower(): value for key, value in self.headers.items()}
                endpoint.requests.append((self.client_address[1], self.path, headers, body))
                status, value, more = remaining.pop(0) if len(remaining) > 1 else remaining[0]
                if status == 0:
                    self.close_connection = True
                    return
                content = value if isinstance(value, bytes) else json.dumps(value).encode()
                self.send_response(status)
                for key, each in {"content-length": str(len(content)), **more}.items():
                    self.send_header(key, each)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def connect() -> Iterator[Callable[..., tuple[Endpoint, ChatModel, list[float]]]]:
    with contextlib.ExitStack() as stack:

        def make(*replies: Reply) -> tuple[Endpoint, ChatModel, list[float]]:
            endpoint, pauses = Endpoint(*replies), list[float]()
            stack.callback(endpoint.close)
            model = ChatModel(Access(endpoint.url, "sk-1", "policy"), 30, pauses.append)
            stack.callback(model.close)
            return endpoint, model, pauses

        yield make


def ok(body: Any = ANSWER) -> Reply:
    return 200, body, {}


def refuse(status: int, code: str | None, message: str, **headers: str) -> Reply:
    return status, {"error": {"message": message, "code": code}}, {k.replace("_", "-"): v for k, v in headers.items()}


def test_answers_come_over_one_connection(connect: Any) -> None:
    endpoint, model, _ = connect(ok())
    tool = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}
    assert model.chat(PROMPT).id == "c-1"
    answer = model.chat(PROMPT, [tool], max_tokens=5)
    assert (answer.message["content"], answer.finish_reason) == ("hi", "stop")
    (first_port, path, headers, body), (port, _, _, with_tools) = endpoint.requests
    assert (path, headers["authorization"], port) == ("/v1/chat/completions", "Bearer sk-1", first_port)
    assert body == {"model": "policy", "messages": PROMPT}
    assert (with_tools["tools"], with_tools["max_tokens"]) == ([{"type": "function", "function": tool}], 5)


def test_request_that_failed_is_repeated_as_the_official_clients_do(connect: Any) -> None:
    endpoint, model, pauses = connect(ok(), (0, None, {}), refuse(503, None, "busy", retry_after="2"), ok())
    model.chat(PROMPT)
    assert model.chat(PROMPT).id == "c-1", "the connection had ended, and the endpoint was busy"
    counts = [headers["x-stainless-retry-count"] for _, _, headers, _ in endpoint.requests]
    assert counts == ["0", "0", "1", "2"]
    assert len({json.dumps(body) for _, _, _, body in endpoint.requests}) == 1, "the same body"
    assert pauses[1] == 2.0
    assert pauses[0] <= 0.5


@pytest.mark.parametrize(
    ("reply", "code", "limit"),
    [
        (refuse(400, "turn_limit", "no turns left"), "turn_limit", True),
        (refuse(400, "context_length_exceeded", "too long"), "context_length_exceeded", True),
        (refuse(410, None, "superseded"), GONE, False),
        (refuse(401, None, "unknown key"), "unauthorized", False),
        ((404, b"nothing here", {}), "not_found", False),
    ],
)
def test_refusal_is_not_repeated(connect: Any, reply: Reply, code: str, limit: bool) -> None:
    endpoint, model, _ = connect(reply)
    with pytest.raises(RefusedError) as caught:
        model.chat(PROMPT)
    assert (caught.value.code, is_limit(caught.value), len(endpoint.requests)) == (code, limit, 1)
    assert str(caught.value), "a message"


def test_endpoint_that_does_not_answer_is_an_error_after_the_retries(connect: Any) -> None:
    endpoint, model, pauses = connect(refuse(500, None, "broken"))
    with pytest.raises(GatewayError, match="HTTP 500: broken"):
        model.chat(PROMPT)
    assert (len(endpoint.requests), len(pauses)) == (5, 4)
    assert all(2**n / 4 <= pause <= 2**n / 2 for n, pause in enumerate(pauses)), pauses


def test_delivered_answer_that_cannot_be_read_is_not_requested_again(connect: Any) -> None:
    endpoint, model, _ = connect(ok({"choices": []}))
    with pytest.raises(GatewayError, match="not an answer of chat completions"):
        model.chat(PROMPT)
    assert len(endpoint.requests) == 1
