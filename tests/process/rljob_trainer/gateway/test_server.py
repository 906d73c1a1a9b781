"""The gateway over HTTP: keys, limits, repeated requests, streams, rewards, and requests that make no sense."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import openai
import pytest

from rljob_api.errors import TransientError, UserError
from rljob_api.manifest.agent import Agent
from rljob_api.wire.calls import ModelAccess
from rljob_trainer.agents.base import OpenEpisode
from rljob_trainer.conversation.template import ChatTemplate
from rljob_trainer.episodes.types import PromptTooLongError
from rljob_trainer.gateway import attempt, server
from rljob_trainer.gateway.server import ModelGateway
from tests.support.chat_templates import build_template
from tests.support.episodes import listed
from tests.support.gateways import SpelledPolicy, check_exact, make_task
from tests.support.waiting import DEADLINE_SECONDS

PATHS = [dialect.path for dialect in server.DIALECTS]
USER = {"role": "user", "content": "What is 2 + 2?"}
CHAT = {"model": "policy", "messages": [USER]}


class Client:
    """A program without an SDK: it sends what the test gives."""

    def __init__(self, session: aiohttp.ClientSession, access: ModelAccess) -> None:
        self.session, self.access = session, access

    async def post(self, path: str = "/v1/chat/completions", **request: Any) -> tuple[int, Any]:
        request.setdefault("headers", {"Authorization": f"Bearer {self.access.api_key}"})
        async with self.session.post(self.access.url + path, **request) as response:
            self.headers = response.headers
            return response.status, await response.json()

    async def chat(self, *messages: Any, retry: int = 0, **fields: Any) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {self.access.api_key}", "x-stainless-retry-count": str(retry)}
        return await self.post(json={**CHAT, "messages": messages or [USER], **fields}, headers=headers)

    async def ask(self, *messages: Any) -> str:
        status, body = await self.chat(*messages)
        assert status == 200, body
        return body["choices"][0]["message"]["content"]

    def stream(self, **fields: Any) -> Any:
        headers = {"x-api-key": self.access.api_key}
        url = f"{self.access.url}/v1/chat/completions"
        return self.session.post(url, json={**CHAT, "stream": True, **fields}, headers=headers)


class Bench:
    """A gateway, and programs that use it."""

    def __init__(self, gateway: ModelGateway, session: aiohttp.ClientSession) -> None:
        self.gateway, self.session = gateway, session

    def begin(self, policy: SpelledPolicy, id: str = "g/train/1/5/2") -> tuple[OpenEpisode, Client]:
        episode = self.gateway.open(make_task(policy, id))
        return episode, self.retry(episode)

    def retry(self, episode: OpenEpisode) -> Client:
        return Client(self.session, episode.start_attempt()[1])


@asynccontextmanager
async def run_bench(
    context_length: int | None = None, turns: int = 100, family: str = "qwen25", **settings: Any
) -> AsyncIterator[Bench]:
    runner = {"function": {"inline": "def run(): pass"}}
    agent = Agent.model_validate({"type": "program", "runner": runner, "maxAssistantTurns": turns})
    gateway = ModelGateway(agent, build_template(family), context_length, **settings)
    await gateway.start("127.0.0.1", 0)
    try:
        async with asyncio.timeout(DEADLINE_SECONDS), aiohttp.ClientSession() as session:
            yield Bench(gateway, session)
    finally:
        await gateway.close()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with run_bench() as bench:
        yield bench


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def leave(request: Coroutine[Any, Any, Any], until: Callable[[], bool]) -> None:
    """Send a request, and close its connection once `until` holds."""
    task = asyncio.create_task(request)
    await wait_until(until)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


# Keys


@pytest.mark.parametrize("path", [*PATHS, "/v1/rewards"])
@pytest.mark.parametrize(
    "headers", [{}, {"Authorization": "Bearer EMPTY"}, {"x-api-key": "EMPTY"}, {"Authorization": "Basic x"}]
)
async def test_requests_without_a_known_key_are_refused(bench, path, headers):
    _, client = bench.begin(SpelledPolicy())

    status, body = await client.post(path, json=CHAT, headers=headers)

    assert (status, client.headers["x-should-retry"]) == (401, "false")
    assert "api_key" in body["error"]["message"]
    assert body.get("type") == ("error" if path == "/v1/messages" else None), "the form of the path's API"


async def test_a_superseded_attempt_is_refused_and_leaves_nothing(bench):
    policy = SpelledPolicy("first", "second")
    episode, old = bench.begin(policy)
    assert await old.ask() == "first"
    new = bench.retry(episode)

    status, body = await old.chat()
    assert (status, body["error"]["code"]) == (410, "attempt_superseded")
    assert "attempt 0 of the episode was superseded by attempt 1" in body["error"]["message"]
    assert (await old.post("/v1/rewards", json={"reward": 1}))[0] == 410

    assert await new.ask() == "second"
    recording = episode.read()
    assert ([turn.text for turn in recording.turns], recording.reward) == (["second"], None)


async def test_an_attempt_that_has_ended_is_refused_before_the_next_one_begins(bench):
    policy = SpelledPolicy("first", "never")
    episode, client = bench.begin(policy)
    await client.ask()
    policy.may_answer.clear()
    waiting = asyncio.create_task(client.chat())
    await wait_until(lambda: len(policy.prompts) == 2)
    episode.end_attempt()

    for status, body in (await waiting, await client.chat()):
        assert (status, body["error"]["code"]) == (410, "attempt_ended")
        assert "attempt 0 of the episode has ended" in body["error"]["message"]
    recording = episode.read()
    assert ([turn.text for turn in recording.turns], recording.refusal) == (["first"], "")


async def test_an_attempt_in_flight_is_cancelled_by_the_next(bench):
    policy = SpelledPolicy("never", "second")
    policy.may_answer.clear()
    episode, old = bench.begin(policy)
    waiting = asyncio.create_task(old.chat())
    await wait_until(lambda: len(policy.prompts) == 1)
    new = bench.retry(episode)

    status, body = await waiting
    assert (status, body["error"]["code"]) == (410, "attempt_superseded")
    policy.may_answer.set()
    assert await new.ask() == "second"
    assert [completion.text for completion in policy.completions] == ["second"], "the first one was cancelled"


async def test_a_program_that_calls_after_its_episode_ended_is_refused(bench):
    policy = SpelledPolicy("a", "b")
    episode, client = bench.begin(policy)
    await client.ask()
    recording = episode.read()
    episode.close()
    episode.close()

    for path in [*PATHS, "/v1/rewards"]:
        assert (await client.post(path, json=CHAT))[0] == 410
    again = episode.read()
    assert (recording.turns, listed(recording.segments)) == (again.turns, listed(again.segments))
    assert len(policy.prompts) == 1


async def test_an_episode_that_ends_cancels_what_is_in_flight(bench):
    policy = SpelledPolicy("never")
    policy.may_answer.clear()
    episode, client = bench.begin(policy)
    waiting = asyncio.create_task(client.chat())
    await wait_until(lambda: len(policy.prompts) == 1)
    assert episode.read().waits_for == "waited for a completion"
    episode.close()

    status, body = await waiting
    assert (status, body["error"]["code"]) == (410, "episode_ended")
    assert not episode.read().turns


@pytest.mark.parametrize("name", ["default", "auto"])
async def test_names_of_other_projects_for_the_model_train_too(bench, name):
    episode, client = bench.begin(SpelledPolicy("yes"))
    status, _ = await client.chat(model=name)
    assert (status, len(episode.read().turns)) == (200, 1)


async def test_only_reward_events_of_agent_lightning_are_rewards(bench):
    episode, client = bench.begin(SpelledPolicy("yes"))
    await client.ask()
    for event, data in (("reward", {"value": 0.5}), ("trace", {"steps": 3})):
        assert (await client.post("/v1/rewards", json={"event_type": event, "data": data}))[0] == 200
    assert episode.read().reward == 0.5


async def test_both_apis_count_the_tokens_of_a_request(bench):
    policy = SpelledPolicy("4")
    _, client = bench.begin(policy)
    for path, body in (("responses/input_tokens", {"input": [USER]}), ("messages/count_tokens", {"messages": [USER]})):
        status, found = await client.post(f"/v1/{path}", json={"model": "policy", **body})
        assert (status, found["object"]) == (200, "response.input_tokens")
        assert not policy.prompts
    await client.ask()
    assert found["input_tokens"] == len(policy.prompts[0])


async def test_compaction_is_the_programs_own(bench):
    _, client = bench.begin(SpelledPolicy())
    status, body = await client.post("/v1/responses/compact", json={"model": "policy", "input": [USER]})
    assert (status, body["error"]["code"]) == (404, "not_found")
    assert "no conversations, and compacts none: ask the model for a summary" in body["error"]["message"]


async def test_other_models_and_paths_are_not_found(bench):
    episode, client = bench.begin(SpelledPolicy())

    status, body = await client.chat(model="gpt-5")
    assert (status, body["error"]["code"]) == (404, "model_not_found")
    assert "'gpt-5' not found; the models are policy" in body["error"]["message"]
    assert "gpt-5" in episode.read().refusal, "a program that used another model shows why it has no turns"
    status, body = await client.post("/v1/embeddings", json={})
    assert status == 404
    assert "/v1/responses" in body["error"]["message"]

    listed = await openai.AsyncOpenAI(base_url=f"{client.access.url}/v1", api_key=client.access.api_key).models.list()
    assert [model.id for model in listed.data] == ["policy"]


# Limits


async def test_the_turn_limit_refuses_further_answers():
    async with run_bench(turns=2) as bench:
        policy = SpelledPolicy("a", "b")
        episode, client = bench.begin(policy)
        await client.ask()
        await client.ask()

        status, body = await client.chat()
        assert (status, body["error"]["code"]) == (400, "turn_limit")
        assert episode.read().refusal == "the episode has reached spec.agent.maxAssistantTurns, 2 answers of the policy"
        assert len(episode.read().turns) == 2


async def test_parallel_requests_do_not_exceed_the_turn_limit():
    async with run_bench(turns=3) as bench:
        policy = SpelledPolicy(*"abc")
        episode, client = bench.begin(policy)
        results = await asyncio.gather(*(client.chat() for _ in range(8)))
        assert sorted(status for status, _ in results) == [200] * 3 + [400] * 5
        check_exact(episode.read(), policy)


async def test_the_context_limit_refuses_a_prompt_and_cuts_an_answer():
    template = build_template("qwen25")
    length = len(template.encode(template.render([USER], [], generate=True)))
    async with run_bench(context_length=length + 3) as bench:
        policy = SpelledPolicy("A long answer")
        episode, client = bench.begin(policy)
        _, body = await client.chat(max_tokens=100)
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"] == {"prompt_tokens": length, "completion_tokens": 3, "total_tokens": length + 3}

        status, body = await client.chat(USER, {"role": "user", "content": "And 3 + 3?"})
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        assert "maximum context length is" in episode.read().refusal
        check_exact(episode.read(), policy)


ENDLESS = "word " * 200_000


def call_with(arguments: Any) -> dict[str, Any]:
    function = {"name": "find", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [USER, {"role": "user", "content": ENDLESS}]},
        {"messages": [USER, {"role": "user", "content": [{"type": "text", "text": ENDLESS}]}]},
        {"messages": [USER, call_with(json.dumps({"x": ENDLESS})), USER]},
        {"messages": [USER, call_with({"x": ENDLESS}), USER]},
        {"messages": [USER], "tools": [{"type": "function", "function": {"name": "find", "description": ENDLESS}}]},
        {"prompt": ENDLESS},
    ],
    ids=["content", "part", "call", "call as an object", "tool", "prompt"],
)
async def test_a_prompt_without_end_is_refused_before_it_is_tokenized_whole(monkeypatch, body):
    sizes, encode = [], ChatTemplate.encode
    monkeypatch.setattr(ChatTemplate, "encode", lambda self, text: sizes.append(len(text)) or encode(self, text))
    async with run_bench(context_length=100) as bench:
        _, client = bench.begin(SpelledPolicy("An answer"))
        sizes.clear()
        path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        status, answer = await client.post(path, json={"model": "policy", **body})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert sum(sizes) <= 2 * attempt._PIECE


# Repeated and parallel requests


@pytest.mark.parametrize("max_short_bytes", [0, 2**20], ids=["threads", "at once"])
async def test_parallel_requests_are_recorded_with_their_exact_tokens(bench, monkeypatch, max_short_bytes):
    monkeypatch.setattr(attempt, "_MAX_SHORT_BYTES", max_short_bytes)
    policy = SpelledPolicy(*(f"answer {i}" for i in range(8)))
    episode, client = bench.begin(policy)
    texts = await asyncio.gather(*(client.ask(USER, {"role": "user", "content": str(i % 4)}) for i in range(8)))
    assert sorted(texts) == [f"answer {i}" for i in range(8)], "identical requests are samples"
    recording = episode.read()
    assert sorted(turn.text for turn in recording.turns) == sorted(texts)
    recorded = [segment.token_ids.tolist() for segment in recording.segments]
    assert sorted(recorded) == sorted(
        prompt + completion.token_ids for prompt, completion in zip(policy.prompts, policy.completions, strict=True)
    )


async def test_the_gateway_answers_others_while_it_plans_a_long_prompt(bench, monkeypatch):
    policy, is_planning, may_plan = SpelledPolicy("short", "long"), threading.Event(), threading.Event()
    render = ChatTemplate.render

    def slow(self: ChatTemplate, messages: Any, *args: Any, **options: Any) -> str:
        if len(messages[0]["content"]) > 1000:
            is_planning.set()
            may_plan.wait(DEADLINE_SECONDS)
        return render(self, messages, *args, **options)

    monkeypatch.setattr(ChatTemplate, "render", slow)
    _, client = bench.begin(policy)
    episode, other = bench.begin(policy, "another")
    waiting = asyncio.create_task(client.ask({"role": "user", "content": "x" * attempt._MAX_SHORT_BYTES}))
    await wait_until(is_planning.is_set)

    assert await other.ask() == "short"
    assert len(episode.read().turns) == 1
    may_plan.set()
    assert await waiting == "long"


async def test_a_request_whose_connection_was_cut_is_answered_once(bench):
    policy = SpelledPolicy("once")
    policy.may_answer.clear()
    episode, client = bench.begin(policy)
    await leave(client.chat(), until=lambda: len(policy.prompts) == 1)
    policy.may_answer.set()

    assert await client.ask() == "once"
    assert len(policy.prompts) == 1
    check_exact(episode.read(), policy)


async def test_a_retry_of_a_delivered_answer_gets_it_again_and_a_new_request_does_not(bench):
    policy = SpelledPolicy("first", "second")
    episode, client = bench.begin(policy)
    _, first = await client.chat()
    assert (await client.chat(retry=1))[1] == first
    assert (await client.chat())[1]["id"] != first["id"]
    assert len(episode.read().turns) == 2


async def test_an_answer_that_no_client_took_is_not_a_turn():
    async with run_bench(retry_seconds=0.0) as bench:
        policy = SpelledPolicy("dropped", "taken")
        policy.may_answer.clear()
        episode, client = bench.begin(policy)
        await leave(client.chat(), until=lambda: len(policy.prompts) == 1)
        policy.may_answer.set()

        assert await client.ask() == "taken"
        assert [turn.text for turn in episode.read().turns] == ["taken"]


async def test_the_sdk_retries_a_connection_that_breaks(bench):
    policy = SpelledPolicy("It is 4.")
    policy.may_answer.clear()
    episode, client = bench.begin(policy)
    num_connections = 0

    async def cut_the_first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        host, port = client.access.url.removeprefix("http://").split(":")
        upstream_reader, upstream = await asyncio.open_connection(host, int(port))
        forward = asyncio.create_task(copy(reader, upstream))
        if num_connections == 1:
            await wait_until(lambda: len(policy.prompts) == 1)
            policy.may_answer.set()
        else:
            await copy(upstream_reader, writer)
        forward.cancel()
        upstream.close()
        writer.close()

    async with await asyncio.start_server(cut_the_first, "127.0.0.1", 0) as proxy:
        port = proxy.sockets[0].getsockname()[1]
        async with openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key=client.access.api_key, max_retries=2
        ) as sdk:
            answer = await sdk.chat.completions.create(**CHAT)

    assert (answer.choices[0].message.content, num_connections) == ("It is 4.", 2)
    assert len(policy.prompts) == 1
    check_exact(episode.read(), policy)


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


# Streams


async def test_a_stream_is_kept_alive_while_it_waits():
    async with run_bench(keep_alive_seconds=0.01) as bench:
        policy = SpelledPolicy("It is 4.")
        policy.may_answer.clear()
        episode, client = bench.begin(policy)
        async with client.stream() as response:
            assert response.status == 200
            first = await response.content.readuntil(b"\n\n")
            second = await response.content.readuntil(b"\n\n")
            policy.may_answer.set()
            rest = await response.text()
        assert first == second == b": keep-alive\n\n"
        assert '"content": "It is 4."' in rest
        assert rest.endswith("data: [DONE]\n\n")
        check_exact(episode.read(), policy)


async def test_an_error_after_the_stream_began_is_an_event():
    async with run_bench(keep_alive_seconds=0.01) as bench:
        policy = SpelledPolicy("never")
        policy.may_answer.clear()
        episode, client = bench.begin(policy)
        async with client.stream() as response:
            await response.content.readuntil(b"\n\n")
            episode.close()
            rest = await response.text()
        event = json.loads(rest.rpartition("data: ")[2])
        assert event["error"]["code"] == "episode_ended"


async def test_a_stream_reports_errors_by_its_status_while_it_can(bench):
    _, client = bench.begin(SpelledPolicy())
    async with client.stream(n=2) as response:
        assert (response.status, response.content_type) == (400, "application/json")


async def test_the_response_names_ignored_fields(bench):
    episode, client = bench.begin(SpelledPolicy("a", "b"))
    await client.chat(temperature=0.5, seed=3, **{"x\r\nSet-Cookie": 1})
    assert client.headers["x-rljob-ignored"] == "seed, temperature, x??Set-Cookie"
    async with client.stream(temperature=0.5) as response:
        assert response.headers["x-rljob-ignored"] == "temperature"
    assert episode.read().ignored == ["seed", "temperature", "x\r\nSet-Cookie"], "each once"


# Rewards


async def test_rewards_are_posted_for_answers_and_for_the_episode(bench):
    episode, client = bench.begin(SpelledPolicy("a", "b", "c"))
    ids = [(await client.chat())[1]["id"] for _ in range(3)]

    for body in (
        {"reward": 0.25, "completion": ids[0]},
        {"reward": 1, "turn": 1},
        {"reward": None, "turn": 2},
        {"reward": 3},
        {"reward": 4.5},
    ):
        assert await client.post("/v1/rewards", json=body) == (200, {"object": "reward"})

    recording = episode.read()
    assert recording.completion_ids == ids
    assert recording.rewards == {ids[0]: 0.25, ids[1]: 1.0, ids[2]: None}
    assert recording.reward == 4.5, "the last one"
    assert (await client.post("/v1/rewards", json={"reward": None}))[0] == 200
    assert episode.read().reward is None, "null is not scored"


@pytest.mark.parametrize(
    "body", [{"reward": "1"}, {"reward": 1, "turn": 9}, {"reward": 1, "completion": "x"}, {"score": 1}]
)
async def test_rewards_that_make_no_sense_are_refused(bench, body):
    episode, client = bench.begin(SpelledPolicy())
    assert (await client.post("/v1/rewards", json=body))[0] == 400
    assert episode.read().refusal


# Requests that make no sense

DEEP = b'{"model": "policy", "messages": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"


@pytest.mark.parametrize("path", [*PATHS, "/v1/rewards"])
@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'"policy"', DEEP], ids=lambda data: str(data[:12])
)
async def test_bodies_that_are_not_json_objects_are_refused(bench, path, data):
    _, client = bench.begin(SpelledPolicy())
    status, body = await client.post(path, data=data)
    assert status == 400
    assert body["error"]["message"]


async def test_nested_messages_and_tools_do_not_stop_the_gateway(bench):
    nested: Any = {}
    for _ in range(400):
        nested = {"x": nested}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": nested}}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": nested}}
    _, client = bench.begin(SpelledPolicy("a", "b", "c"))
    for messages, tools in (([USER], [tool]), ([USER, {"role": "assistant", "tool_calls": [call]}, USER], [])):
        status, body = await client.chat(*messages, tools=tools)
        assert status in (200, 400), body
    assert await client.ask()


async def test_a_body_that_is_too_large_is_refused(bench):
    _, client = bench.begin(SpelledPolicy("a"))
    text = "x" * server.MAX_BODY_BYTES
    status, body = await client.chat({"role": "user", "content": text})
    assert (status, body["error"]["code"]) == (413, "request_too_large")
    assert await client.ask() == "a"


async def test_halves_of_surrogate_pairs_are_replaced(bench):
    policy = SpelledPolicy("a", "b")
    _, client = bench.begin(policy)
    assert (await client.chat({"role": "user", "content": "\ud800"}, stop="\udfff"))[0] == 200
    assert (await client.post("/v1/completions", json={"model": "policy", "prompt": "\ud800"}))[0] == 200
    assert policy.stops[0] == ["?"]


@pytest.mark.parametrize(("text", "reason"), [("Action", "stop_sequence"), ("", "end_turn")])
async def test_the_messages_api_names_the_stop_sequence_that_ended_the_answer(bench, text, reason):
    class Stopped(SpelledPolicy):
        async def __call__(self, token_ids, max_tokens=None, stop=()):
            completion = await super().__call__(token_ids, max_tokens, stop)
            sampled = build_template(self.family).encode(f"{completion.text}{text}")
            return replace(completion, token_ids=sampled, logprobs=[0.0] * len(sampled), versions=[0] * len(sampled))

    _, client = bench.begin(Stopped("abc"))
    body = {"model": "policy", "max_tokens": 9, "messages": [USER], "stop_sequences": ["Other", "Action"]}
    _, found = await client.post("/v1/messages", json=body)
    assert (found["content"][0]["text"], found["stop_reason"]) == ("abc", reason)
    assert found["stop_sequence"] == (text or None)


@pytest.mark.parametrize("prompt", [[10**9], [-1], []])
async def test_prompts_of_unknown_tokens_do_not_reach_the_engine(bench, prompt):
    policy = SpelledPolicy()
    _, client = bench.begin(policy)
    assert (await client.post("/v1/completions", json={"model": "policy", "prompt": prompt}))[0] == 400
    assert not policy.prompts


async def test_messages_that_the_template_refuses_are_an_error_of_the_request():
    async with run_bench(family="llama3") as bench:
        _, client = bench.begin(SpelledPolicy())
        calls = [{"id": str(i), "function": {"name": "f", "arguments": "{}"}} for i in range(2)]
        status, body = await client.chat(USER, {"role": "assistant", "content": "", "tool_calls": calls})
        assert (status, body["error"]["code"]) == (400, "template_error")
        assert "the chat template fails" in body["error"]["message"]


# The policy and the server


@pytest.mark.parametrize("error", [TransientError("no rollout"), UserError("a wrong token"), RuntimeError("bug")])
async def test_a_policy_that_fails_is_reported_without_retries(bench, error):
    class Failing(SpelledPolicy):
        async def __call__(self, *_: Any, **__: Any) -> Any:
            raise error

    episode, client = bench.begin(Failing())
    status, body = await client.chat()
    assert (status, body["error"]["code"]) == (503, "policy_unavailable")
    assert client.headers["x-should-retry"] == "false"
    assert not episode.read().turns


async def test_a_prompt_that_the_engine_finds_too_long_is_refused(bench):
    class Short(SpelledPolicy):
        async def __call__(self, *_: Any, **__: Any) -> Any:
            raise PromptTooLongError(90, 64)

    episode, client = bench.begin(Short())
    status, body = await client.chat()
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert episode.read().refusal.startswith("This model's maximum context length is 64 tokens, and the request has 90")


async def test_close_ends_requests_in_flight():
    async with run_bench(keep_alive_seconds=0.01) as bench:
        policy = SpelledPolicy("a", "b")
        policy.may_answer.clear()
        _, client = bench.begin(policy)
        _, other = bench.begin(policy, "another")
        waiting = asyncio.create_task(client.chat())
        async with other.stream() as response:
            await response.content.readuntil(b"\n\n")
            await wait_until(lambda: len(policy.prompts) == 2)
            await bench.gateway.close()
            assert "gateway_stopped" in await response.text()
        assert (await waiting)[1]["error"]["code"] == "gateway_stopped"
        with pytest.raises(aiohttp.ClientConnectionError):
            await client.chat()


async def test_turns_and_responses_are_counted():
    turns, responses = [], []
    callbacks = {
        "on_turn": turns.append,
        "on_response": lambda api, model, status: responses.append((api, status)),
    }
    async with run_bench(**callbacks) as bench:
        await count_turns_and_responses(bench, turns, responses)


async def count_turns_and_responses(bench, turns, responses):
    policy = SpelledPolicy("a", "b", "c")
    policy.may_answer.clear()
    episode, client = bench.begin(policy)
    assert episode.read().waits_for == "has not called the model yet"
    waiting = asyncio.create_task(client.chat())
    await wait_until(lambda: len(policy.prompts) == 1)

    assert bench.gateway.statistics()["in_flight"] == bench.gateway.statistics()["episodes"] == 1
    assert bench.gateway.describe_wait().startswith("1 completion for a program, oldest 0.")
    policy.may_answer.set()
    await waiting
    assert bench.gateway.describe_wait() == ""
    assert episode.read().waits_for == "computes since its turn 1"

    await client.chat(retry=1)
    async with client.stream() as response:
        await response.read()
    await client.chat(n=2)
    await client.post("/v1/nothing")
    policy.may_answer.clear()
    await leave(client.chat(), until=lambda: len(policy.prompts) == 3)
    await wait_until(lambda: len(responses) == 6)
    assert responses == [
        *[("chat/completions", 200)] * 3,
        ("chat/completions", 400),
        ("unknown", 404),
        ("chat/completions", 499),
    ]
    assert len(turns) == 2, "the answer of a retry counts once"
    assert all(min(each.to_engine, each.to_client) > 0 for each in turns)


async def test_a_port_in_use_is_a_user_error(bench):
    agent = Agent.model_validate({"type": "program", "runner": {"command": ["true"]}})
    gateway = ModelGateway(agent, build_template("qwen25"), None)
    port = int(bench.gateway.url.rpartition(":")[2])
    with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{port}"):
        await gateway.start("127.0.0.1", port)
