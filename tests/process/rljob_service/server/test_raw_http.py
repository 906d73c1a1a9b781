"""What is nearly HTTP, to a real server: it is refused or cut off, stays small, and the server answers others."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator

import pytest

from tests.support.raw_http import Peer, check_nearly_http, find_smuggled, read_statuses
from tests.support.reward_process import TOKEN, Server

MIB = 1 << 20
REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
AUTHORIZED = b"Authorization: Bearer %b\r\n" % TOKEN.encode()
BODY = json.dumps({"id": "r", "prompt": "2+2?", "completion": "4"}).encode()


@pytest.fixture(scope="module")
def server(start_server) -> Server:
    return start_server(REWARD)


@pytest.fixture
def peer(server: Server) -> Iterator[Peer]:
    yield Peer((server.host, 8080), b"/v1/score", AUTHORIZED, server.pid)
    assert server.request("GET", "/rljob/live", token="none")[0] == 200
    assert "Traceback" not in server.log.read_text()


def test_a_request_within_a_request_is_never_answered(peer: Peer) -> None:
    assert find_smuggled(peer) == {}


def test_bytes_that_are_nearly_http_are_refused_or_cut_off(peer: Peer) -> None:
    length = b"Content-Length: %d\r\n\r\n" % len(BODY)
    chunked = b"Transfer-Encoding: chunked\r\n\r\n%x;a=b\r\n%b\r\n0\r\nX: y\r\n\r\n" % (len(BODY), BODY)
    group = b'{"id": "g", "samples": [%b]}' % BODY
    requests = [
        peer.begin() + length + BODY,
        peer.begin() + chunked,
        b"POST /v1/score-group HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n%b" % (AUTHORIZED, len(group), group),
        b"GET /v1/info HTTP/1.1\r\n%b\r\n" % AUTHORIZED,
        b"GET /rljob/live HTTP/1.1\r\n\r\n",
    ]
    peer.exchange(requests[0])
    check_nearly_http(peer, requests, max_examples=300, max_bytes=32 * MIB)


def test_small_requests_without_the_token_get_small_answers(peer: Peer) -> None:
    for path in (b"/" + b"a" * 15_000, b"/v1/score", b"/rljob/live", b"/rljob/ready", b"/metrics"):
        received = peer.exchange(b"GET %b HTTP/1.1\r\nX: %b\r\n\r\n" % (path, b"b" * 1000), ends=False)
        assert len(received) < 64 << 10, path


@pytest.mark.parametrize(
    "body",
    [
        b'{"id": "r", "completion": "4", "prompt": [%b]}' % b",".join([b"0"] * 400_000),
        b'{"id": "r", "completion": "4", "prompt": "x", %b}' % b",".join(b'"%d": 0' % n for n in range(100_000)),
        b'{"id": "r", "completion": "4", "prompt": %b}' % (b"[" * 400_000),
        b'{"id": "r", "completion": "4", "prompt": "x", "ground_truth": %b}' % (b"9" * 400_000),
    ],
    ids=["items", "fields", "levels", "digits"],
)
def test_a_body_with_many_errors_gets_a_short_answer(peer: Peer, body: bytes) -> None:
    peer.exchange(peer.begin() + b"Content-Length: 2\r\n\r\n{}", ends=False)
    before = peer.count_bytes()
    received = peer.exchange(peer.begin() + b"Content-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(body), body))
    assert len(received) < 8 << 10, received[:2000]
    assert all(status in (200, 422) for status in read_statuses(received)), received[:200]
    assert peer.count_bytes() - before < 192 * MIB


def test_a_client_that_reads_nothing_is_not_answered_further(peer: Peer, server: Server) -> None:
    before = peer.count_bytes()
    with socket.create_connection(peer.address, timeout=0.5) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n" * 20_000)
        assert server.request("GET", "/rljob/live", token="none")[0] == 200
        assert peer.count_bytes() - before < 16 * MIB
