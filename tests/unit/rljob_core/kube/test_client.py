"""The client's errors, and what it reads of a response."""

import asyncio
import json
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime, parsedate_to_datetime

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.aio.client import Configuration

from rljob_api.errors import TransientError
from rljob_core.backend import UnansweredError
from rljob_core.kube import client
from tests.support.waiting import DEADLINE_SECONDS


@pytest.fixture
async def api():
    async def handle(request):
        if request.path == "/refused":
            return web.json_response({"reason": "Conflict", "message": "it has changed"}, status=409)
        if request.path == "/lines":
            return web.Response(text="one\ntwo\nrest")
        return web.json_response({}) if request.path == "/json" else web.Response(text="not JSON")

    app = web.Application()
    app.router.add_get("/{path:.*}", handle)
    server = TestServer(app)
    await server.start_server()
    api = client.KubeApi(Configuration(host=str(server.make_url(""))))
    yield api
    await api.close()
    await server.close()


async def test_refusal_is_an_api_error_and_a_lost_connection_a_transient_one(api):
    calls = []
    api.observers.append(lambda *call: calls.append(call))
    with pytest.raises(client.ApiError, match="it has changed") as raised:
        await api.request("GET", "/refused")
    assert (raised.value.code, raised.value.reason) == (409, "Conflict")
    api.server = "http://127.0.0.1:1"
    with pytest.raises(TransientError, match="GET /version: the API server did not answer"):
        await api.request("GET", "/version")
    assert calls == [("GET", "/refused", 409), ("GET", "/version", 0)]


async def test_text_and_lines_of_a_response_are_read(api):
    assert await api.read_text("/text") == "not JSON"
    assert [line async for line in api.stream_lines("/lines", {}, idle_timeout_seconds=5)] == ["one", "two", "rest"]


@pytest.mark.parametrize(
    ("seconds", "known"),
    [(100, 100), (-100, -100), (3, 0), (None, 0)],
    ids=["ahead", "behind", "the network", "no date"],
)
async def test_clock_is_compared_with_the_servers(api, monkeypatch, seconds, known):
    """A clock that is ahead deleted Pods by force within their grace period."""
    now = datetime(2026, 1, 1, tzinfo=UTC)
    date = format_datetime(now, usegmt=True) if seconds is not None else "yesterday"
    monkeypatch.setattr(client, "utc_now", lambda: now + timedelta(seconds=seconds or 0))
    monkeypatch.setattr(client, "parsedate_to_datetime", lambda _: parsedate_to_datetime(date))
    await api.request("GET", "/json")
    assert api.ahead == timedelta(seconds=known)


@given(st.text())
def test_any_text_of_a_request_is_the_same_as_json_and_as_yaml(text):
    """The API server reads an apply as YAML, which knows neither surrogate pairs nor raw control characters."""
    sent = client._encode_json({"inline": text}).decode()
    assert json.loads(sent) == yaml.safe_load(sent) == {"inline": text}


@pytest.mark.parametrize(
    ("text", "read"), [("\U0001f600", "\U0001f600"), ("\\ud83d", "\\ud83d"), ("\ud83d!", "\ufffd!"), ("\x7f", "\x7f")]
)
def test_emoji_is_sent_and_half_an_emoji_replaced(text, read):
    sent = client._encode_json([text]).decode()
    assert json.loads(sent) == yaml.safe_load(sent) == [read]


def test_http_server_needs_no_tls():
    configuration = Configuration()
    configuration.host = "http://127.0.0.1:8001"
    assert client._ssl_context(configuration) is None


async def test_separate_client_never_waits_for_the_connections_of_the_first(free_api):
    """The Lease of a leader whose reconciles wait for slow webhooks must be renewed."""
    api, answer = free_api
    lease_api, hooked, codes = api.separate(max_connections=1), [], []

    async def hook(request):
        hooked.append(request.url.path)

    api.hooks.append(hook)
    api.observers.append(lambda verb, path, code: codes.append(code))
    slow = asyncio.create_task(api.request("GET", "/slow"))
    async with asyncio.timeout(DEADLINE_SECONDS):
        assert await lease_api.request("GET", "/fast") == {}
        answer.set()
        await slow
    assert set(hooked) == {"/slow", "/fast"}, "tests and metrics see both"
    assert codes == [200, 200]
    await lease_api.close()


async def test_hung_requests_of_one_namespace_leave_connections_to_others(free_api, monkeypatch):
    (api, answer), is_sent = free_api, asyncio.Event()

    async def hook(request):
        is_sent.set()

    api.hooks.append(hook)
    slow = asyncio.create_task(api.request("GET", "/api/v1/namespaces/slow/pods/slow"))
    async with asyncio.timeout(DEADLINE_SECONDS):
        await is_sent.wait()
    waiting = asyncio.create_task(api.request("GET", "/api/v1/namespaces/slow/pods/b"))
    async with asyncio.timeout(DEADLINE_SECONDS):
        assert await api.request("GET", "/api/v1/namespaces/fast/pods/a") == {}
    assert not waiting.done(), "its namespace has its connection"
    monkeypatch.setattr(client, "REQUEST_TIMEOUT_SECONDS", 0)
    with pytest.raises(UnansweredError) as raised:
        await api.request("GET", "/api/v1/namespaces/slow/pods/c")
    expected = "GET /api/v1/namespaces/slow/pods/c: not sent in 0 s, since 1 requests of namespace slow wait for their"
    assert str(raised.value).startswith(expected)
    monkeypatch.undo()
    answer.set()
    assert await asyncio.gather(slow, waiting) == [{}, {}]
    assert "fast" not in api._of_namespace, "of a namespace without requests nothing is kept"


async def test_late_answer_says_so(free_api, monkeypatch):
    api, _ = free_api
    monkeypatch.setattr(client, "REQUEST_TIMEOUT_SECONDS", 1e-9)
    with pytest.raises(UnansweredError, match="/slow: the API server did not answer in time"):
        await api.request("GET", "/slow")


@pytest.fixture
async def free_api():
    """A client with one connection, and an event that lets /slow answer."""
    may_answer = asyncio.Event()

    async def handle(request):
        if request.path.endswith("/slow"):
            await may_answer.wait()
        return web.json_response({})

    app = web.Application()
    app.router.add_get("/{path:.*}", handle)
    server = TestServer(app)
    await server.start_server()
    api = client.KubeApi(Configuration(host=str(server.make_url(""))), max_connections=1)
    yield api, may_answer
    await api.close()
    await server.close()
