"""Models besides the policy, by the official SDKs against the real gateway and an endpoint that the test plays."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port
from yarl import URL

from rljob_api.manifest.agent import Agent
from rljob_api.wire.calls import ModelAccess
from rljob_trainer.agents.base import OpenEpisode
from rljob_trainer.gateway.server import ModelGateway
from tests.support.chat_templates import build_template
from tests.support.gateways import SpelledPolicy, make_task
from tests.support.waiting import DEADLINE_SECONDS

USER: Any = {"role": "user", "content": "Is it right?"}
ANSWER = {
    "id": "c1",
    "object": "chat.completion",
    "created": 1,
    "model": "judge-large",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}],
}
KEY = "secret-of-the-endpoint"


class Endpoint:
    """Answers what the test sets, and keeps what it was asked."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.answers: list[web.Response] = []
        """Sent first, instead of the usual ones."""
        self.server = TestServer(web.Application())
        self.server.app.router.add_post("/base/{path:.*}", self.handle)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append((request.path_qs, {k.lower(): v for k, v in request.headers.items()}, body))
        if self.answers:
            return self.answers.pop(0)
        if request.path.endswith("/messages"):
            message = {"id": "m1", "type": "message", "role": "assistant", "model": "judge-large", "stop_reason": None}
            usage = {"input_tokens": 1, "output_tokens": 1}
            return web.json_response({**message, "content": [{"type": "text", "text": "yes"}], "usage": usage})
        if not body.get("stream"):
            return web.json_response(ANSWER)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for word in ("ye", "s"):
            choice = {"index": 0, "delta": {"content": word}, "finish_reason": None}
            chunk = {**ANSWER, "object": "chat.completion.chunk", "choices": [choice]}
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


class Episode:
    """One episode, whose program may call the policy and the judge."""

    def __init__(self, gateway: ModelGateway, endpoint: Endpoint, responses: list[tuple[str, str, int]]) -> None:
        self.endpoint = endpoint
        self.policy = SpelledPolicy()
        self.open: OpenEpisode = gateway.open(make_task(self.policy, "g/train/1/5/2"))
        self.access: ModelAccess = self.open.start_attempt()[1]
        self.responses = responses

    def openai(self, **settings: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.access.url}/v1", api_key=self.access.api_key, **settings)


@asynccontextmanager
async def run_episode(url: str | None = None) -> AsyncIterator[Episode]:
    endpoint = Endpoint()
    await endpoint.server.start_server()
    model = {"name": "gpt-5-mini", "model": "judge-large", "url": url or str(endpoint.server.make_url("/base/v1/"))}
    other = {"name": "org/small", "url": model["url"]}
    runner = {"function": {"inline": "def run(): pass"}}
    agent = Agent.model_validate({"type": "program", "runner": runner, "models": [model, other]})
    responses: list[tuple[str, str, int]] = []
    gateway = ModelGateway(
        agent,
        build_template("qwen25"),
        None,
        api_keys={"gpt-5-mini": KEY},
        on_response=lambda *response: responses.append(response),
    )
    await gateway.start("127.0.0.1", 0)
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            yield Episode(gateway, endpoint, responses)
    finally:
        await gateway.close()
        await endpoint.server.close()


@pytest.fixture
async def episode() -> AsyncIterator[Episode]:
    async with run_episode() as episode:
        yield episode


async def test_a_listed_model_answers_at_its_endpoint_and_never_trains(episode: Episode) -> None:
    reply = await episode.openai().chat.completions.create(
        model="gpt-5-mini", messages=[USER], temperature=0, response_format={"type": "json_object"}, n=2
    )

    [(path, headers, body)] = episode.endpoint.requests
    assert reply.choices[0].message.content == "yes"
    assert (path, headers["authorization"]) == ("/base/v1/chat/completions", f"Bearer {KEY}")
    assert body["model"] == "judge-large"
    assert (body["temperature"], body["n"]) == (0, 2), "what the policy refuses, an endpoint may take"
    assert episode.access.api_key not in str(episode.endpoint.requests)
    assert not episode.open.read().segments
    assert episode.responses == [("chat/completions", "gpt-5-mini", 200)]


async def test_streams_pass_through(episode: Episode) -> None:
    stream = await episode.openai().chat.completions.create(model="gpt-5-mini", messages=[USER], stream=True)

    assert [chunk.choices[0].delta.content async for chunk in stream] == ["ye", "s"]


async def test_anthropics_api(episode: Episode) -> None:
    client = anthropic.AsyncAnthropic(base_url=episode.access.url, api_key=episode.access.api_key)

    reply = await client.messages.create(
        model="gpt-5-mini", max_tokens=8, messages=[USER], extra_query={"beta": "true"}
    )

    [(path, headers, _)] = episode.endpoint.requests
    assert reply.content[0].type == "text"
    assert path == "/base/v1/messages?beta=true"
    assert KEY in (headers.get("x-api-key"), headers.get("authorization", "").removeprefix("Bearer "))
    assert "anthropic-version" in headers


async def test_the_endpoint_counts_tokens_of_its_model(episode: Episode) -> None:
    client = anthropic.AsyncAnthropic(base_url=episode.access.url, api_key=episode.access.api_key)
    episode.endpoint.answers.append(web.json_response({"input_tokens": 12345}))

    reply = await client.messages.count_tokens(model="gpt-5-mini", messages=[USER])

    [(path, _, _)] = episode.endpoint.requests
    assert (path, reply.input_tokens) == ("/base/v1/messages/count_tokens", 12345)


async def test_the_sdk_retries_what_the_endpoint_says_may_be_retried(episode: Episode) -> None:
    episode.endpoint.answers = [web.json_response({}, status=429, headers={"retry-after-ms": "1"}) for _ in range(2)]

    await episode.openai(max_retries=2).chat.completions.create(model="gpt-5-mini", messages=[USER])

    assert len(episode.endpoint.requests) == 3


async def test_a_refusal_is_the_episodes_reason(episode: Episode) -> None:
    episode.endpoint.answers = [web.json_response({"error": {"message": "no such key"}}, status=401)]

    with pytest.raises(openai.AuthenticationError, match="no such key"):
        await episode.openai().chat.completions.create(model="gpt-5-mini", messages=[USER])

    assert "gpt-5-mini: its endpoint answered 401" in (episode.open.read().refusal or "")


async def test_an_endpoint_that_does_not_listen_may_be_retried() -> None:
    async with run_episode(f"http://127.0.0.1:{unused_port()}/v1") as episode:
        with pytest.raises(openai.InternalServerError, match=r"gpt-5-mini: .* did not answer") as caught:
            await episode.openai(max_retries=0).chat.completions.create(model="gpt-5-mini", messages=[USER])

    assert caught.value.status_code == 502
    assert "x-should-retry" not in caught.value.response.headers


async def test_a_model_is_found_by_a_name_with_a_slash(episode: Episode) -> None:
    headers = {"Authorization": f"Bearer {episode.access.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        for path in ("org/small", "org%2Fsmall"):  # SDKs differ
            url = URL(f"{episode.access.url}/v1/models/{path}", encoded=True)
            async with session.get(url) as answer:
                assert (answer.status, (await answer.json())["id"]) == (200, "org/small")


async def test_models_are_listed_and_others_are_errors(episode: Episode) -> None:
    client = episode.openai()

    assert [model.id async for model in client.models.list()] == ["policy", "gpt-5-mini", "org/small"]
    assert (await client.models.retrieve("gpt-5-mini")).id == "gpt-5-mini"
    with pytest.raises(openai.NotFoundError, match=r"policy, which trains, or policy/SEAT .*, gpt-5-mini, org/small"):
        await client.chat.completions.create(model="gpt-5", messages=[USER])
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt-5")
