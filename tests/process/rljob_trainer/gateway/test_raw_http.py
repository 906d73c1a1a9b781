"""What is nearly HTTP, to the gateway of programs: it is refused or cut off, stays small, and others are answered."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from rljob_api.manifest.agent import Agent
from rljob_trainer.gateway.server import ModelGateway
from tests.support.chat_templates import build_template
from tests.support.gateways import SpelledPolicy, make_task
from tests.support.raw_http import Peer, check_nearly_http, find_smuggled, read_statuses

MIB = 1 << 20
BODY = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "2+2?"}]}).encode()


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    """A gateway in a thread, which counts tokens: no policy is asked."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> tuple[ModelGateway, str]:
        agent = Agent.model_validate({"type": "program", "runner": {"function": {"inline": "def run(): pass"}}})
        gateway = ModelGateway(agent, build_template("qwen25"), None)
        await gateway.start("127.0.0.1", 0)
        _, access = gateway.open(make_task(SpelledPolicy(), "g/train/1/5/2")).start_attempt()
        return gateway, access.api_key

    gateway, key = asyncio.run_coroutine_threadsafe(start(), loop).result()
    address = urlsplit(gateway.url)
    assert address.hostname is not None
    assert address.port is not None
    headers = b"x-api-key: %b\r\n" % key.encode()
    yield Peer((address.hostname, address.port), b"/v1/messages/count_tokens", headers, os.getpid())
    asyncio.run_coroutine_threadsafe(gateway.close(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(autouse=True)
def checked(peer: Peer, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert read_statuses(peer.exchange(peer.begin(b"GET") + b"Connection: close\r\n\r\n", ends=False)) == [405], (
        "it answers"
    )
    assert not [record for record in caplog.records if record.exc_info and record.levelno >= logging.WARNING]


def post(peer: Peer, body: bytes) -> bytes:
    return peer.begin() + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def test_a_request_within_a_request_is_never_answered(peer: Peer) -> None:
    assert find_smuggled(peer) == {}


def test_bytes_that_are_nearly_http_are_refused_or_cut_off(peer: Peer) -> None:
    chunked = b"Transfer-Encoding: chunked\r\n\r\n%x;a=b\r\n%b\r\n0\r\nX: y\r\n\r\n" % (len(BODY), BODY)
    requests = [
        peer.begin() + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY,
        peer.begin() + chunked,
        b"GET /v1/models HTTP/1.1\r\n%b\r\n" % peer.headers,
    ]
    assert read_statuses(peer.exchange(requests[0], ends=False)) == [200]
    check_nearly_http(peer, requests, max_examples=200, max_bytes=64 * MIB)


@pytest.mark.parametrize(
    "messages",
    [
        b"[%b]" % b",".join([b"0"] * 200_000),
        b"[" * 400_000,
        b'[{"role": "user", "content": %b}]' % (b"9" * 400_000),
        b'[{"role": "%b", "content": "x"}]' % (b"r" * 400_000),
    ],
    ids=["items", "levels", "digits", "role"],
)
def test_a_body_with_many_errors_gets_a_short_answer(peer: Peer, messages: bytes) -> None:
    before = peer.count_bytes()
    for path in (b"/v1/chat/completions", b"/v1/messages", b"/v1/messages/count_tokens"):
        data = post(peer, b'{"model": "policy", "max_tokens": 5, "messages": %b}' % messages)
        received = peer.exchange(data.replace(peer.path, path, 1), ends=False)
        assert len(received) < 8 << 10, received[:2000]
        assert all(400 <= status < 500 for status in read_statuses(received)), received[:200]
    assert peer.count_bytes() - before < 64 * MIB
