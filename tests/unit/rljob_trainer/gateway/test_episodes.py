"""Episodes and their attempts, without a server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from rljob_api.wire.calls import ToolSchema
from rljob_trainer.agents.base import Recording
from rljob_trainer.gateway.attempt import Attempt, Policy
from rljob_trainer.gateway.episodes import AttemptKeys, AttemptName, Episodes
from rljob_trainer.gateway.types import ModelRequest, RequestError
from tests.support.agent_services import call_text
from tests.support.chat_templates import build_template
from tests.support.gateways import SpelledPolicy, make_task

USER = {"role": "user", "content": "2 + 2?"}


@pytest.fixture
def episodes():
    with ThreadPoolExecutor(1) as threads:
        yield Episodes(Policy(build_template("qwen25"), threads, 100, None, 60.0))


async def answer(attempt: Attempt, *messages: dict[str, str], num_bytes: int = 0) -> str:
    exchange = attempt.join(ModelRequest("policy", [USER, *messages]), b"", num_bytes, is_retry=False)
    await exchange.wait()
    sampled = await attempt.exchanges.take(exchange)
    exchange.is_delivered = True
    attempt.exchanges.leave(exchange)
    return sampled.answer.id


def find_refusal(episodes: Episodes, key: str) -> tuple[int, str]:
    with pytest.raises(RequestError) as caught:
        episodes.find(key)
    return caught.value.status, caught.value.code


def test_only_the_key_of_the_current_attempt_is_accepted(episodes):
    episode = episodes.open(make_task(SpelledPolicy()))
    keys = []
    for number in range(3):
        attempt, access = episode.start_attempt()
        assert (attempt, access.name) == (number, "policy")
        keys.append(access.api_key)
        assert episodes.find(access.api_key) is episode.attempt

    assert [find_refusal(episodes, key) for key in keys[:2]] == [(410, "attempt_superseded")] * 2
    assert find_refusal(episodes, AttemptKeys().make(AttemptName("g/train/1/5/2", 2))) == (401, "invalid_api_key")
    episode.close()
    assert {find_refusal(episodes, key) for key in keys} == {(410, "episode_ended")}
    assert not len(episodes)


def test_an_episode_without_an_attempt_has_an_empty_recording(episodes):
    episode = episodes.open(make_task(SpelledPolicy()))
    assert episode.read() == Recording()
    episode.close()


def test_an_episode_is_open_once(episodes):
    episodes.open(make_task(SpelledPolicy()))
    with pytest.raises(ValueError, match="open already"):
        episodes.open(make_task(SpelledPolicy()))


def test_closing_all_gives_the_reason(episodes):
    episode = episodes.open(make_task(SpelledPolicy()))
    episode.start_attempt()
    episodes.close()
    with pytest.raises(RequestError, match="the job's driver stops"):
        episode.attempt.main.check_open()


@pytest.mark.parametrize("num_bytes", [0, 2**30], ids=["at once", "thread"])
async def test_a_recording_is_a_copy(episodes, num_bytes):
    episode = episodes.open(make_task(SpelledPolicy("4.", "6.")))
    episode.start_attempt()
    first = await answer(episode.attempt.main, num_bytes=num_bytes)
    recording = episode.read()
    num_tokens = len(recording.segments[0].token_ids)
    second = await answer(
        episode.attempt.main,
        {"role": "assistant", "content": "4."},
        {"role": "user", "content": "3 + 3?"},
        num_bytes=num_bytes,
    )

    assert (recording.completion_ids, len(recording.turns)) == ([first], 1)
    assert len(recording.segments[0].token_ids) == num_tokens
    later = episode.read()
    assert (later.completion_ids, len(later.segments)) == ([first, second], 1)
    assert [message["content"] for message in later.messages] == ["2 + 2?", "4.", "3 + 3?", "6."]
    assert later.generation == "g"
    assert later.waits_for == "computes since its turn 2"


async def test_calls_of_tools_are_part_of_the_turn(episodes):
    text = call_text("add", '{"a": 1}') + call_text("add", '{"a": 2}')
    episode = episodes.open(make_task(SpelledPolicy(text)))
    episode.start_attempt()
    tool = ToolSchema(name="add", parameters={"type": "object", "properties": {}})
    exchange = episode.attempt.main.join(ModelRequest("policy", [USER], tools=[tool]), b"", 0, is_retry=False)
    await exchange.wait()
    sampled = await episode.attempt.main.exchanges.take(exchange)

    [turn] = episode.read().turns
    ids = [call["id"] for call in sampled.answer.message["tool_calls"]]
    assert [(call.id, call.name, call.arguments) for call in turn.tool_calls] == [
        (ids[0], "add", {"a": 1}),
        (ids[1], "add", {"a": 2}),
    ]


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [([], "at least one token"), ([3, 10**9], "token ids from 0 to"), ([-1, 3], "token ids from 0 to")],
)
async def test_a_prompt_is_one_or_more_token_ids_of_the_model(episodes, prompt, problem):
    episode = episodes.open(make_task(SpelledPolicy()))
    episode.start_attempt()
    with pytest.raises(RequestError, match=problem):
        await episode.attempt.main.count_tokens(ModelRequest("policy", prompt=prompt))
    assert await episode.attempt.main.count_tokens(ModelRequest("policy", prompt=[3, 4])) == 2
