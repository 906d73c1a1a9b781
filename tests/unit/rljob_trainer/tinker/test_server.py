"""Answers of the HTTP server: results, and errors in a form that the SDK does not try again."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest

from rljob_api.errors import UserError
from rljob_trainer.tinker import server as server_module
from rljob_trainer.tinker import service as service_module
from rljob_trainer.tinker.server import TinkerServer
from rljob_trainer.tinker.service import Service
from tests.unit.rljob_trainer.tinker.test_service import NAME, Bench

KEYS = {"ann": "tml-ann", "bob": "tml-bob"}
Post = Callable[..., Any]


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


@pytest.fixture
async def post(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Post]:
    """Sends a request, and returns the status and the JSON object of the answer."""
    monkeypatch.setattr(server_module, "_POLL_SECONDS", 0.0)
    server = TinkerServer(bench.service, lambda: KEYS)
    url = await server.start("127.0.0.1", 0)
    async with aiohttp.ClientSession(url) as session:

        async def post(path: str, body: Any = None, key: str = "tml-ann", method: str = "POST") -> tuple[int, Any]:
            data = body if isinstance(body, bytes) else None
            given = {"data": data} if data is not None else {"json": body or {}}
            async with session.request(method, f"/api/v1/{path}", headers={"X-API-Key": key}, **given) as response:
                return response.status, await response.json()

        yield post
    await server.close()


async def test_a_session_is_opened_with_a_key(post):
    status, answer = await post("create_session", {"tags": [], "user_metadata": None, "sdk_version": "0.38"})
    assert (status, answer["type"]) == (200, "create_session")
    assert await post("session_heartbeat", {"session_id": answer["session_id"]}) == (200, {"type": "session_heartbeat"})
    status, refused = await post("session_heartbeat", {"session_id": answer["session_id"]}, "tml-bob")
    assert (status, refused["error"]) == (
        404,
        f"session {answer['session_id']} is not known: the service was started again, or it has ended",
    )
    assert await post(f"sessions/{answer['session_id']}/finish") == (200, {})


async def test_the_server_says_what_it_has(post):
    status, answer = await post("get_server_capabilities", method="GET")
    assert (status, [each["model_name"] for each in answer["supported_models"]]) == (200, [NAME])
    for path in ("client/config", "client/dynamic_config"):
        assert await post(path) == (200, {}), "the SDK's defaults are right"


@pytest.mark.parametrize("key", ["", "tml-other", "tml-\N{SNOWMAN}"])
async def test_another_key_is_refused(post, key):
    status, answer = await post("create_session", {}, key.encode().decode("latin-1"))
    assert (status, answer["error"]) == (
        401,
        "the key is not known here; set TINKER_API_KEY to that of `rljob serve`, or of the Secret",
    )


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("copy_weights", {}, "POST /api/v1/copy_weights is not supported by this service"),
        ("create_session", {}, "tags: Field required; use the tinker SDK 0.38"),
        ("create_session", b"{", "Expecting property name"),
        ("forward_backward", b"\x08", "the body is no ForwardBackwardRequest"),
        ("weights_info", {}, "path: must be tinker://MODEL/weights/NAME"),
    ],
)
async def test_what_is_wrong_has_a_sentence_and_a_status_that_is_not_tried_again(post, path, body, message):
    status, answer = await post(path, body)
    assert status == 400
    assert message in answer["error"]


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("save_weights_external", {"path": "x"}, "POST /api/v1/save_weights_external is not supported by this service"),
        ("optim_step", {"adam_params": {"learning_rate": "fast"}}, "use the tinker SDK 0.38"),
        ("load_weights", {"path": "x", "optimizer": True, "weights_access_token": "t"}, "weights_access_token is not"),
    ],
)
async def test_a_command_that_is_refused_does_not_keep_the_next_one_waiting(bench, post, path, fields, message):
    model = await bench.model()
    status, answer = await post(path, {"model_id": model, "seq_id": 1, **fields})
    assert status == 200
    assert message in (await bench.result(answer))["error"]
    assert "metrics" in await bench.result(bench.step(model, 2))


async def test_a_defect_shows_no_stack_trace_and_is_not_tried_again(post, monkeypatch):
    def fail(*_: Any) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(Service, "get_sampler", fail)
    assert await post("samplers/x", method="GET") == (400, {"error": "the service failed; see its log"})


async def test_a_result_that_is_not_there_yet_is_asked_for_again(bench, post):
    session = bench.session()
    bench.service.futures.begin(f"{session}:train:0:1", asyncio.Event().wait)  # type: ignore[arg-type]
    status, answer = await post("retrieve_future", {"request_id": f"{session}:train:0:1"})
    assert (status, answer) == (408, {"queue_state": "active"})
    status, answer = await post("retrieve_future", {"request_id": f"{session}:train:0:2"})
    assert status == 404
    assert "is not known, or its result was taken long ago" in answer["error"]


async def test_once_the_service_has_failed_all_requests_have_the_reason(bench, post):
    bench.service.failure = "the service has ended: a rank died"
    assert await post("create_session", {}) == (400, {"error": "the service has ended: a rank died"})


async def test_a_port_that_is_in_use_is_an_error_of_the_user(bench):
    first, second = TinkerServer(bench.service, lambda: KEYS), TinkerServer(bench.service, lambda: KEYS)
    url = await first.start("127.0.0.1", 0)
    with pytest.raises(UserError, match=r"cannot listen on 127\.0\.0\.1:.*; pass another --port"):
        await second.start("127.0.0.1", int(url.rpartition(":")[2]))
    await first.close()


async def test_a_sample_whose_result_is_gone_is_asked_for_again(bench, post):
    session = bench.session()
    status, answer = await post("retrieve_future", {"request_id": f"{session}:sample:0:1"})
    assert status == 410, "the SDK does not send the sample again"
    assert "ask for it again" in answer["error"]


async def test_a_journal_that_cannot_be_written_is_waited_for(bench, post, monkeypatch):
    monkeypatch.setattr(service_module, "_PAUSE_SECONDS", 0.0)
    model, write, failures = await bench.model(), bench.journal._write, [True] * 4
    body = {"model_id": model, "seq_id": 1, "optim_params": {"learning_rate": 0.5}}

    def fail(*statements: Any) -> None:
        if failures:
            failures.pop()
            raise sqlite3.OperationalError("database or disk is full")
        write(*statements)

    monkeypatch.setattr(bench.journal, "_write", fail)
    assert await post("optim_step", body) == (503, {"error": "the journal cannot be written: database or disk is full"})
    status, answer = await post("optim_step", body)
    while status != 200:
        status, answer = await post("optim_step", body)
    assert "metrics" in await bench.result(answer)
    assert [name for name, *_ in bench.group.calls] == ["create", "update"]
    assert bench.journal.read()[-1].result is not None
