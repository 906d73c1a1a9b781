"""Programs with the clients of OpenAI and Anthropic, unmodified: the tokens recorded are those that were sampled."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import anthropic
import httpx2
import openai
import pydantic
import pytest

from rljob_trainer.agents.base import OpenEpisode
from rljob_trainer.episodes.types import NOT_SAMPLED
from tests.support import sdk_programs
from tests.support.agent_services import call_text
from tests.support.gateways import SpelledPolicy, build_environment, check_exact, make_task, running_gateway
from tests.support.waiting import DEADLINE_SECONDS

QUESTION: list[Any] = [{"role": "user", "content": "What is 2 + 2?"}]
CALL, SECOND_CALL = call_text("add", '{"a": 2, "b": 2}'), call_text("add", '{"a": 3, "b": 3}')
FOUR, SIX = {"a": 2, "b": 2}, {"a": 3, "b": 3}

Start = Callable[..., OpenEpisode]


@pytest.fixture
async def start(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """Return a function that begins an episode, whose address and key are in the environment from then on."""
    async with AsyncExitStack() as stack:

        async def begin(policy: SpelledPolicy, constraints: str = "refuse", **options: Any) -> OpenEpisode:
            gateway = running_gateway(policy.family, maxAssistantTurns=8, constraints=constraints, options=options)
            episode = (await stack.enter_async_context(gateway)).open(make_task(policy))
            for name, value in build_environment(episode.start_attempt()[1]).items():
                monkeypatch.setenv(name, value)
            return episode

        yield begin


ALL_PROGRAMS = pytest.mark.parametrize("program", sdk_programs.PROGRAMS, ids=lambda program: program.__name__)


async def run(program: Callable[[], Any]) -> Any:
    """Run a program: a function that blocks, or one that returns a coroutine."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        result = await asyncio.to_thread(program)
        return await result if inspect.isawaitable(result) else result


@ALL_PROGRAMS
async def test_a_conversation_with_tools_is_one_segment_of_the_sampled_tokens(start, program):
    policy = SpelledPolicy(f"I add.\n{CALL}", "It is 4.", SECOND_CALL, " It is 6: Ünï 漢字 🙂\n")
    episode = await start(policy)

    answers = await run(program)

    assert [answer.strip() for answer in answers] == ["It is 4.", "It is 6: Ünï 漢字 🙂"]
    recording = episode.read()
    check_exact(recording, policy)
    assert (len(recording.turns), len(recording.segments)) == (4, 1), recording.breaks
    assert [call.arguments for turn in recording.turns for call in turn.tool_calls] == [FOUR, SIX]


@ALL_PROGRAMS
async def test_parallel_calls_continue_the_segment(start, program):
    policy = SpelledPolicy(f"{CALL}\n{SECOND_CALL}", "4 and 6.", f"I add.\n{SECOND_CALL}\n{CALL}", "6 and 4.")
    episode = await start(policy)

    assert await run(program) == ["4 and 6.", "6 and 4."]

    recording = episode.read()
    check_exact(recording, policy)
    assert (len(recording.turns), len(recording.segments)) == (4, 1), recording.breaks
    assert [[call.arguments for call in turn.tool_calls] for turn in recording.turns] == [
        [FOUR, SIX],
        [],
        [SIX, FOUR],
        [],
    ]


@ALL_PROGRAMS
async def test_reasoning_is_not_text_and_leaves_the_segment_as_the_template_says(start, program):
    """Qwen 3 leaves reasoning out before the last message of the user."""
    texts = [CALL, "It is 4.", SECOND_CALL, "It is 6."]
    policy = SpelledPolicy(*(f"<think>\nI add.\n</think>\n\n{text}" for text in texts), family="qwen3")
    episode = await start(policy)

    answers = await run(program)

    assert [answer.strip() for answer in answers] == ["It is 4.", "It is 6."]
    recording = episode.read()
    check_exact(recording, policy)
    assert [len(set(segment.turns.tolist()) - {NOT_SAMPLED}) for segment in recording.segments] == [2, 2]
    assert [each.cause for each in recording.breaks] == ["history"]


async def test_completions_of_text_and_of_token_ids(start):
    policy = SpelledPolicy("4, 6, 8", "5, 7")
    episode = await start(policy)

    async def program() -> None:
        client = openai.AsyncOpenAI()
        first = await client.completions.create(model="policy", prompt="0, 2, ", max_tokens=512, logprobs=0)
        assert first.choices[0].text == "4, 6, 8"
        assert first.choices[0].logprobs.token_logprobs == policy.completions[0].logprobs
        assert "".join(first.choices[0].logprobs.tokens).startswith("4, 6, 8")
        stream = await client.completions.create(model="policy", prompt=[80, 81, 82], stream=True, stop=["\n"])
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "5, 7"

    await run(program)

    assert policy.prompts[1] == [80, 81, 82]
    assert policy.stops == [[], ["\n"]]
    check_exact(episode.read(), policy)


async def test_a_limit_cuts_the_answer_in_every_api(start):
    policy = SpelledPolicy(*["A long answer."] * 4)
    episode = await start(policy)

    async def program() -> list[Any]:
        client, other = openai.AsyncOpenAI(), anthropic.AsyncAnthropic()
        chat = await client.chat.completions.create(model="policy", messages=QUESTION, max_completion_tokens=6)
        text = await client.completions.create(model="policy", prompt="2 + 2", max_tokens=6)
        response = await client.responses.create(model="policy", input=QUESTION, max_output_tokens=6)
        message = await other.messages.create(model="policy", messages=QUESTION, max_tokens=6)
        assert [chat.usage.completion_tokens, response.usage.output_tokens, message.usage.output_tokens] == [6, 6, 6]
        return [
            (chat.choices[0].finish_reason, chat.choices[0].message.content),
            (text.choices[0].finish_reason, text.choices[0].text),
            (response.incomplete_details.reason, response.output_text),
            (message.stop_reason, message.content[0].text),
        ]

    reasons, texts = zip(*await run(program), strict=True)

    assert reasons == ("length", "length", "max_output_tokens", "max_tokens")
    assert set(texts) == {"A long"}
    recording = episode.read()
    check_exact(recording, policy)
    assert all(turn.truncated for turn in recording.turns)


async def test_completion_ids_name_the_turns_in_every_api(start):
    policy = SpelledPolicy("a", "b", "c", "d")
    episode = await start(policy)

    async def program() -> list[str]:
        client, other = openai.AsyncOpenAI(), anthropic.AsyncAnthropic()
        answers = [
            await client.chat.completions.create(model="policy", messages=QUESTION),
            await client.completions.create(model="policy", prompt="2 + 2"),
            await client.responses.create(model="policy", input=QUESTION),
            await other.messages.create(model="policy", messages=QUESTION, max_tokens=64),
        ]
        return [answer.id for answer in answers]

    assert await run(program) == episode.read().completion_ids


async def test_tokens_are_counted_without_a_turn(start):
    policy = SpelledPolicy("4")
    episode = await start(policy)

    async def program() -> tuple[int, int]:
        client = anthropic.AsyncAnthropic()
        counted = await client.messages.count_tokens(model="policy", messages=QUESTION, system="Be brief.")
        assert episode.read().turns == []
        message = await client.messages.create(model="policy", messages=QUESTION, system="Be brief.", max_tokens=64)
        return counted.input_tokens, message.usage.input_tokens

    counted, used = await run(program)
    assert counted == used == len(policy.prompts[0])
    check_exact(episode.read(), policy)


def refuse_by_chat() -> None:
    openai.OpenAI().chat.completions.create(model="policy", messages=QUESTION, n=2)


def refuse_by_stream() -> None:
    openai.OpenAI().chat.completions.create(model="policy", messages=QUESTION, n=2, stream=True)


def refuse_by_responses() -> None:
    openai.OpenAI().responses.create(model="policy", input=QUESTION, previous_response_id="policy-1")


def refuse_by_messages() -> None:
    anthropic.Anthropic().messages.create(
        model="policy", max_tokens=64, messages=QUESTION, tools=[], tool_choice={"type": "any"}
    )


@pytest.mark.parametrize(
    ("program", "error", "text"),
    [
        (refuse_by_chat, openai.BadRequestError, "n: not supported"),
        (refuse_by_stream, openai.BadRequestError, "n: not supported"),
        (refuse_by_responses, openai.BadRequestError, "previous_response_id: not supported"),
        (refuse_by_messages, anthropic.BadRequestError, "tool_choice: any is not supported"),
    ],
    ids=["chat", "stream", "responses", "messages"],
)
async def test_a_refused_field_is_an_error_of_the_client_that_names_it(start, program, error, text):
    policy = SpelledPolicy()
    episode = await start(policy)

    with pytest.raises(error, match=text):
        await run(program)

    assert text.split(":")[0] in episode.read().refusal
    assert not policy.prompts


class Sum(pydantic.BaseModel):
    value: int


async def test_ignored_constraints_are_named_and_the_client_reads_its_own_form(start):
    call = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    policy = SpelledPolicy('{"value": 4}', '{"value": 4}', call, "I will not call.", call)
    episode = await start(policy, constraints="ignore")
    schema = {"type": "object", "properties": {}}
    function = {"type": "function", "function": {"name": "add", "parameters": schema}}

    def program() -> list[Any]:
        chat, responses = openai.OpenAI().chat.completions, openai.OpenAI().responses
        parsed = chat.parse(model="policy", messages=QUESTION, response_format=Sum).choices[0].message.parsed
        output = responses.parse(model="policy", input=QUESTION, text_format=Sum).output_parsed
        found = [parsed, output]
        for choice in ("required", {"type": "function", "function": {"name": "add"}}):
            raw = chat.with_raw_response.create(model="policy", messages=QUESTION, tools=[function], tool_choice=choice)
            found.append((raw.headers["x-rljob-ignored"], bool(raw.parse().choices[0].message.tool_calls)))
        message = anthropic.Anthropic().messages.create(
            model="policy",
            max_tokens=64,
            messages=QUESTION,
            tools=[{"name": "add", "input_schema": schema}],
            tool_choice={"type": "any"},
        )
        return [*found, message.stop_reason]

    assert await run(program) == [
        Sum(value=4),
        Sum(value=4),
        ("tool_choice", True),
        ("tool_choice", False),
        "tool_use",
    ]
    check_exact(episode.read(), policy)


async def count_requests(client_type: type, ask: Callable[[Any], Any], library: Any) -> tuple[int, int]:
    """Return how often the client sends a request, and the status of the error that it raises."""
    requests = []

    async def count(request: httpx2.Request) -> None:
        requests.append(request)

    async with client_type(http_client=httpx2.AsyncClient(event_hooks={"request": [count]})) as client:
        with pytest.raises(library.APIStatusError) as caught:
            await ask(client)
    return len(requests), caught.value.status_code


ASK: list[tuple[type, Callable[[Any], Any], Any]] = [
    (openai.AsyncOpenAI, lambda client: client.chat.completions.create(model="policy", messages=QUESTION), openai),
    (openai.AsyncOpenAI, lambda client: client.responses.create(model="policy", input="Hi"), openai),
    (
        anthropic.AsyncAnthropic,
        lambda client: client.messages.create(model="policy", messages=QUESTION, max_tokens=64),
        anthropic,
    ),
]


@pytest.mark.parametrize(("client_type", "ask", "library"), ASK, ids=["chat", "responses", "messages"])
async def test_clients_do_not_repeat_what_cannot_succeed(start, monkeypatch, client_type, ask, library):
    episode = await start(SpelledPolicy())

    episode.close()
    assert await run(lambda: count_requests(client_type, ask, library)) == (1, 410)

    monkeypatch.setenv("OPENAI_API_KEY", "sk-unknown")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-unknown")
    assert await run(lambda: count_requests(client_type, ask, library)) == (1, 401)


@pytest.mark.parametrize(("client_type", "ask", "library"), ASK, ids=["chat", "responses", "messages"])
async def test_a_retry_after_a_timeout_gets_the_answer_that_was_sampled_once(start, client_type, ask, library):
    policy = SpelledPolicy("4")
    policy.may_answer.clear()
    episode = await start(policy)
    requests = []

    async def release(request: httpx2.Request) -> None:
        requests.append(request)
        if len(requests) == 2:
            policy.may_answer.set()

    async def program() -> Any:
        http_client = httpx2.AsyncClient(event_hooks={"request": [release]})
        async with client_type(http_client=http_client, timeout=0.5, max_retries=8) as client:
            return await ask(client)

    answer = await run(program)

    assert len(policy.prompts) == 1
    recording = episode.read()
    check_exact(recording, policy)
    assert recording.completion_ids == [answer.id]


async def stream_chat(http_client: Any) -> list[str]:
    client = openai.AsyncOpenAI(http_client=http_client)
    stream = await client.chat.completions.create(model="policy", messages=QUESTION, stream=True)
    return [chunk.choices[0].delta.content or "" async for chunk in stream]


async def stream_completion(http_client: Any) -> list[str]:
    client = openai.AsyncOpenAI(http_client=http_client)
    stream = await client.completions.create(model="policy", prompt="2 + 2 =", stream=True)
    return [chunk.choices[0].text async for chunk in stream]


async def stream_response(http_client: Any) -> list[str]:
    client = openai.AsyncOpenAI(http_client=http_client)
    stream = await client.responses.create(model="policy", input="2 + 2?", stream=True)
    return [event.delta async for event in stream if event.type == "response.output_text.delta"]


async def stream_message(http_client: Any) -> list[str]:
    client = anthropic.AsyncAnthropic(http_client=http_client)
    async with client.messages.stream(model="policy", max_tokens=64, messages=QUESTION) as stream:
        return [text async for text in stream.text_stream]


STREAMS = pytest.mark.parametrize(
    "program", [stream_chat, stream_completion, stream_response, stream_message], ids=lambda program: program.__name__
)


@STREAMS
async def test_a_stream_waits_for_a_slow_answer_with_keep_alives(start, program):
    policy = SpelledPolicy("It is 4.")
    policy.may_answer.clear()
    episode = await start(policy, keep_alive_seconds=0.01)

    async def answer(response: httpx2.Response) -> None:
        policy.may_answer.set()

    async with httpx2.AsyncClient(event_hooks={"response": [answer]}) as http_client:
        texts = await run(lambda: program(http_client))

    assert "".join(texts) == "It is 4."
    check_exact(episode.read(), policy)


@STREAMS
async def test_an_error_in_a_stream_is_an_error_of_the_client(start, program):
    policy = SpelledPolicy()  # It has nothing to say, and raises.
    policy.may_answer.clear()
    episode = await start(policy, keep_alive_seconds=0.01)

    async def answer(response: httpx2.Response) -> None:
        policy.may_answer.set()

    async with httpx2.AsyncClient(event_hooks={"response": [answer]}) as http_client:
        with pytest.raises((openai.APIError, anthropic.APIError), match="the policy does not answer"):
            await run(lambda: program(http_client))

    assert episode.read().turns == []
