"""The middleware: the token, readiness, and the served weights."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from rljob_api.wire.weights import EngineMemory, RolloutWeights, WeightManifest
from rljob_trainer.rollout.middleware import ModelMiddleware, RolloutMiddleware
from rljob_trainer.rollout.naps import NotWarmError
from rljob_trainer.rollout.puller import ReplicaState

TOKEN = "secret"
GOOD = [(b"authorization", b"Bearer secret")]


class Inner:
    """Stands for vLLM: responds to every request."""

    def __init__(self) -> None:
        self.scopes: list[dict[str, Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"x-inner", b"1")]})
            await send({"type": "http.response.body", "body": b"inner"})


class Watch:
    """Stands for the watch of the engine, which answers unless there is a reason."""

    def __init__(self) -> None:
        self.reason = ""

    def reason_silent(self) -> str:
        return self.reason

    async def check(self, seconds: float) -> str:
        return self.reason


class Client:
    """Sends requests through the middleware."""

    def __init__(self, naps: Any = None) -> None:
        self.inner, self.state, self.watch = Inner(), ReplicaState(), Watch()
        self.middleware = RolloutMiddleware(self.inner, token=TOKEN, state=self.state, watch=self.watch, naps=naps)

    async def request(
        self,
        path: str,
        headers: list[tuple[bytes, bytes]] | None = None,
        query: str = "",
        kind: str = "http",
        method: str = "GET",
    ) -> tuple[int, str, dict[str, str]]:
        sent: list[dict[str, Any]] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> dict[str, Any]:
            return {"type": "http.request"}

        scope = {"type": kind, "path": path, "headers": headers or [], "query_string": query.encode(), "method": method}
        await self.middleware(scope, receive, send)
        if kind != "http":
            return (sent[0]["code"] if sent else 0), "", {}
        start, *rest = sent
        names = {name.decode(): value.decode() for name, value in start["headers"]}
        return start["status"], b"".join(message["body"] for message in rest).decode(), names


@pytest.fixture
def client() -> Client:
    return Client()


def _manifest(version: int) -> WeightManifest:
    return WeightManifest(generation="g", version=version, url="u", num_bytes=1, file_hash="s", checksum="c")


def _serve(state: ReplicaState, version: int) -> None:
    state.record_change(serving=RolloutWeights(generation="g", version=version, checksum="c"))


GUARDED = [
    *("/v1/completions", "/update_weights", "/pause", "/resume", "/start_weight_update", "/collective_rpc"),
    *(
        "/rljob/sleep",
        "/rljob/wake",
        "/rljob/weights",
        "/rljob/ready/",
        "/rljob/ready/x",
        "/RLJOB/READY",
        "/metrics/",
        "/health",
        "/",
        "",
    ),
]


@pytest.mark.parametrize("path", GUARDED)
@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"Bearer wrong")],
        [(b"authorization", b"Bearer secret2")],
        [(b"authorization", b"secret")],
        [(b"authorization", b"Basic secret")],
        [(b"x-authorization", b"Bearer secret")],
        [*GOOD, (b"authorization", b"Bearer wrong")],
    ],
)
async def test_request_without_the_token_never_reaches_vllm(client: Client, path: str, headers: Any) -> None:
    status, _, _ = await client.request(path, headers)
    assert status == 401
    assert client.inner.scopes == [], "vLLM saw a request without the token"


async def test_request_with_the_token_reaches_vllm(client: Client) -> None:
    _serve(client.state, 0)
    assert (await client.request("/v1/completions", GOOD))[:2] == (200, "inner")


async def test_metrics_and_readiness_need_no_token(client: Client) -> None:
    assert (await client.request("/metrics"))[:2] == (200, "inner")
    assert (await client.request("/rljob/ready"))[0] == 503


async def test_websocket_without_the_token_is_closed(client: Client) -> None:
    assert (await client.request("/v1/realtime", kind="websocket"))[0] == 1008
    assert client.inner.scopes == []


async def test_lifespan_passes(client: Client) -> None:
    await client.request("", kind="lifespan")
    assert len(client.inner.scopes) == 1


def test_empty_token_is_rejected() -> None:
    with pytest.raises(ValueError, match="token"):
        RolloutMiddleware(Inner(), token="", state=ReplicaState(), watch=Watch())


async def test_readiness_follows_the_weights_and_reports_the_reason(client: Client) -> None:
    assert (await client.request("/rljob/ready"))[:2] == (503, "the engine is warming up")
    client.state.record_change(is_warm=True)
    assert "no weights" in (await client.request("/rljob/ready"))[1]
    client.state.record_change(announced=_manifest(3))
    assert "has loaded no weights yet, but the head announces g:3" in (await client.request("/rljob/ready"))[1]
    _serve(client.state, 3)
    assert (await client.request("/rljob/ready"))[:2] == (200, "ready")
    client.state.record_change(announced=_manifest(4))
    assert (await client.request("/rljob/ready"))[0] == 503


async def test_served_weights_are_reported(client: Client) -> None:
    status, body, headers = await client.request("/rljob/weights", GOOD)
    assert (status, headers["content-type"]) == (200, "application/json")
    assert RolloutWeights.model_validate_json(body) == RolloutWeights()
    _serve(client.state, 2)
    assert RolloutWeights.model_validate_json((await client.request("/rljob/weights", GOOD))[1]).key == "g:2"


async def test_replica_that_cannot_serve_the_announced_weights_says_why(client: Client) -> None:
    _serve(client.state, 2)
    client.state.record_change(announced=_manifest(3), error="weights g:3: no space left")
    served = json.loads((await client.request("/rljob/weights", GOOD))[1])
    assert (served["version"], served["error"]) == (2, "weights g:3: no space left")
    _serve(client.state, 3)
    assert json.loads((await client.request("/rljob/weights", GOOD))[1])["error"] == ""


async def test_request_for_a_version_waits_until_it_is_served(client: Client) -> None:
    request = asyncio.create_task(client.request("/rljob/weights", GOOD, "want=g:2&timeout=5"))
    await asyncio.sleep(0)
    _serve(client.state, 1)
    await asyncio.sleep(0)
    assert not request.done()
    _serve(client.state, 2)
    assert json.loads((await request)[1])["version"] == 2


async def test_request_for_a_version_times_out_with_the_served_one(client: Client) -> None:
    _serve(client.state, 1)
    status, body, _ = await client.request("/rljob/weights", GOOD, "want=g:2&timeout=0.01")
    assert (status, json.loads(body)["version"]) == (200, 1)


@pytest.mark.parametrize("path", ["/v1/completions", "/inference/v1/generate"])
async def test_broken_replica_rejects_completions(client: Client, path: str) -> None:
    client.state.record_change(is_broken=True, error="weights g:2: half a load")
    status, body, _ = await client.request(path, GOOD)
    assert status == 503
    assert "half a load" in body
    assert client.inner.scopes == []


@pytest.mark.parametrize("path", ["/v1/completions", "/inference/v1/generate"])
async def test_replica_rejects_completions_before_its_first_weights(client: Client, path: str) -> None:
    status, body, _ = await client.request(path, GOOD)
    assert (status, body) == (503, "the engine has loaded no weights yet")
    assert client.inner.scopes == []
    _serve(client.state, 0)
    assert (await client.request(path, GOOD))[0] == 200


class ScriptedNaps:
    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.error: Exception | None = None

    async def sleep(self) -> EngineMemory:
        return self._answer("sleep")

    async def wake(self, generation: str, version: int) -> EngineMemory:
        return self._answer((generation, version))

    def _answer(self, call: Any) -> EngineMemory:
        self.calls.append(call)
        if self.error:
            raise self.error
        return EngineMemory(num_bytes=7, seconds=0.5)


async def test_replica_of_a_trainer_pod_sleeps_and_wakes_on_request() -> None:
    naps = ScriptedNaps()
    client = Client(naps)
    status, body, _ = await client.request("/rljob/sleep", GOOD, method="POST")
    assert (status, EngineMemory.model_validate_json(body).num_bytes) == (200, 7)
    assert (await client.request("/rljob/wake", GOOD, "want=g:3", method="POST"))[0] == 200
    assert naps.calls == ["sleep", ("g", 3)]
    for query in ("", "want=", "want=g", "want=:1", "want=g:-1"):
        status, body, _ = await client.request("/rljob/wake", GOOD, query, method="POST")
        assert status == 400
        assert "GENERATION:VERSION" in body
    assert (await client.request("/rljob/sleep", GOOD))[0] == 405
    for error, status in ((NotWarmError("warming up"), 409), (RuntimeError("CUDA error"), 500)):
        naps.error = error
        assert (await client.request("/rljob/sleep", GOOD, method="POST"))[:2][0] == status
    assert len(naps.calls) == 4
    assert client.inner.scopes == []


async def test_replica_with_devices_of_its_own_does_not_sleep(client: Client) -> None:
    for path in ("/rljob/sleep", "/rljob/wake"):
        assert (await client.request(path, GOOD, "want=g:1", method="POST"))[0] == 404


@pytest.mark.parametrize("path", ["/v1/completions", "/inference/v1/generate"])
async def test_sleeping_replica_rejects_completions(client: Client, path: str) -> None:
    _serve(client.state, 0)
    client.state.record_change(is_warm=True, is_asleep=True)
    status, body, _ = await client.request(path, GOOD)
    assert (status, "asleep" in body) == (503, True)


async def test_a_silent_engine_is_not_ready_not_healthy_and_reports_no_weights(client: Client) -> None:
    """The API server would answer for it."""
    client.state.record_change(is_warm=True, announced=_manifest(3))
    _serve(client.state, 3)
    assert (await client.request("/health", GOOD))[:2] == (200, "inner")
    client.watch.reason = "the engine has not answered for 40 s"
    for path in ("/rljob/ready", "/health", "/rljob/weights"):
        assert (await client.request(path, GOOD))[:2] == (503, client.watch.reason), path
    assert (await client.request("/rljob/live"))[0] == 200, "the process ends itself: a probe need not"


class ModelClient(Client):
    """The same through the middleware of a served model's engine."""

    def __init__(self) -> None:
        super().__init__()
        self.reason, self.changes = "", list[str]()
        naps: Any = self
        self.middleware = ModelMiddleware(self.inner, token=TOKEN, naps=naps, watch=self.watch)  # type: ignore[assignment, arg-type]

    def reason_not_ready(self) -> str:
        return self.reason

    async def sleep(self) -> EngineMemory:
        self.changes.append("sleep")
        return EngineMemory(num_bytes=1, seconds=0)

    async def wake(self) -> EngineMemory:
        if self.reason == "warming":
            raise NotWarmError(self.reason)
        self.changes.append("wake")
        return EngineMemory(num_bytes=2, seconds=0)


async def test_engine_of_a_served_model_answers_while_it_is_awake() -> None:
    client = ModelClient()
    assert (await client.request("/classify"))[0] == 401
    assert (await client.request("/classify", GOOD))[:2] == (200, "inner")
    assert (await client.request("/rljob/ready"))[:2] == (200, "ready")
    client.reason = "asleep"
    assert (await client.request("/classify", GOOD))[:2] == (503, "asleep")
    assert (await client.request("/v1/chat/completions", GOOD))[:2] == (503, "asleep")
    assert (await client.request("/rljob/ready"))[:2] == (503, "asleep")
    assert (await client.request("/metrics"))[:2] == (200, "inner")


async def test_engine_of_a_served_model_changes_its_turn_without_a_version() -> None:
    client = ModelClient()
    assert (await client.request("/rljob/sleep", GOOD))[0] == 405
    for path, num_bytes in (("/rljob/sleep", 1), ("/rljob/wake", 2)):
        status, body, _ = await client.request(path, GOOD, method="POST")
        assert (status, EngineMemory.model_validate_json(body).num_bytes) == (200, num_bytes)
    client.reason = "warming"
    assert (await client.request("/rljob/wake", GOOD, method="POST"))[0] == 409
    assert client.changes == ["sleep", "wake"]


async def test_a_silent_engine_of_a_served_model_gets_no_requests() -> None:
    client = ModelClient()
    client.watch.reason = "the engine owes an answer without requests for 40 s"
    for path in ("/rljob/ready", "/classify", "/health"):
        assert (await client.request(path, GOOD))[:2] == (503, client.watch.reason), path
    assert (await client.request("/metrics"))[0] == 200
    assert (await client.request("/rljob/sleep", GOOD, method="POST"))[0] == 200, "the turn may change before its end"
