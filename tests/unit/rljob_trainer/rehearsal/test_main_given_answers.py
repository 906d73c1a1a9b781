"""Given answers as completions, and how an episode ends that asks for more."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rljob_inputs.prompts import Prompt
from rljob_trainer.agents.base import EpisodeTask
from rljob_trainer.agents.loop import ConversationLoop
from rljob_trainer.episodes.types import Episode, EpisodeEnd, EpisodeFailure, Turn
from rljob_trainer.rehearsal.main import (
    GivenAnswers,
    build_completion,
    end_after_given_answers,
    find_end_id,
    limit_turns,
)
from tests.support.agent_services import MESSAGES, FakeServices, call_text, make_agent, reply
from tests.support.chat_templates import build_template
from tests.support.hosted_episodes import make_program

TEMPLATE = build_template("smollm2")
END_ID = TEMPLATE.encode("<|im_end|>")[0]


async def play(answers: list[str], services: FakeServices, **agent: object) -> Episode:
    given = GivenAnswers(answers, TEMPLATE, END_ID, max_tokens=64)
    loop = ConversationLoop(make_agent(**agent), services, TEMPLATE, None)  # type: ignore[arg-type]
    prompt = Prompt(0, MESSAGES, [1], ground_truth="4")
    [episode] = await loop.run(EpisodeTask("e", "eval", prompt, 0, 0, given))
    if given.is_used_up:
        end_after_given_answers(episode)
    return episode


def test_end_token_is_the_templates_and_without_one_the_tokenizers() -> None:
    tokenizer = SimpleNamespace(eos_token_id=77)
    assert find_end_id(TEMPLATE, tokenizer) == END_ID
    assert find_end_id(build_template("plain"), tokenizer) == 77


def test_completion_ends_with_the_end_token() -> None:
    completion = build_completion("It is 4.", TEMPLATE, END_ID, max_tokens=64)
    assert (completion.token_ids, completion.truncated) == ([*TEMPLATE.encode("It is 4."), END_ID], False)
    assert len(completion.logprobs) == len(completion.versions) == len(completion.token_ids)


def test_answer_over_the_token_limit_is_cut_off_as_in_training() -> None:
    token_ids = TEMPLATE.encode("It is four.")
    completion = build_completion("It is four.", TEMPLATE, END_ID, max_tokens=len(token_ids) - 1)
    assert (completion.token_ids, completion.truncated) == (token_ids[:-1], True)
    assert completion.text == TEMPLATE.decode(token_ids[:-1])
    assert build_completion("It is four.", TEMPLATE, None, max_tokens=len(token_ids)).truncated is False


@pytest.mark.parametrize("stop", [["STOP"], ["def", "STOP", "nowhere"]])
def test_answer_ends_before_a_stop_string_as_in_training(stop: list[str]) -> None:
    completion = build_completion("abcSTOPdef", TEMPLATE, END_ID, max_tokens=64, stop=stop)
    assert (completion.text, completion.truncated) == ("abc", False)
    assert completion.token_ids == TEMPLATE.encode("abcSTOP")  # no end token follows


async def test_stop_strings_of_the_job_and_of_the_request_end_given_answers() -> None:
    given = GivenAnswers(["a. b; c"] * 3, TEMPLATE, END_ID, max_tokens=64, stop=[";"])
    assert [(await given([1], None, stop)).text for stop in ([], ["."], ["?"])] == ["a. b", "a", "a. b"]


async def test_episode_ends_after_the_replies_to_the_last_given_answer() -> None:
    services = FakeServices(user=[reply("too low", -0.1), reply("too high", -0.2)])
    episode = await play(["3", "5"], services, user=True)
    assert [(turn.text, turn.reward) for turn in episode.turns] == [("3", -0.1), ("5", -0.2)]
    assert [message["content"] for message in episode.messages[1:]] == ["3", "too low", "5", "too high"]
    assert (episode.text, episode.truncated, episode.end) == ("5", False, EpisodeEnd.MAX_TURNS)
    [segment] = episode.segments
    assert TEMPLATE.decode(segment.token_ids).endswith("too high<|im_end|>\n<|im_start|>assistant\n")


async def test_result_of_a_call_in_the_last_given_answer_is_part_of_the_episode() -> None:
    episode = await play([call_text("add", '{"a": 2}')], FakeServices(add="4"), tools=["add-tool"])
    assert [call.error for call in episode.turns[-1].tool_calls] == [""]
    assert episode.messages[-1]["content"] == "4"


async def test_episode_that_ends_before_the_answers_do_keeps_its_end() -> None:
    episode = await play(["4", "5"], FakeServices(user=[reply(None, 1.0)]), user=True)
    assert (len(episode.turns), episode.end) == (1, EpisodeEnd.USER)


@pytest.mark.parametrize("reply_", [{"text": 7}])
async def test_failed_episode_keeps_its_failure(reply_: dict[str, object]) -> None:
    episode = await play(["3"], FakeServices(user=[reply_]), user=True)
    assert (episode.end, len(episode.turns)) == (EpisodeEnd.FAILED, 1)


def test_gateway_refuses_a_program_that_continues_after_the_empty_answer() -> None:
    program = make_program(maxAssistantTurns=5)
    assert [limit_turns(program, count).turn_limit for count in (2, 4, 9)] == [3, 5, 5]
    loop = make_agent(user=True)
    assert limit_turns(loop, 2) is loop


@pytest.mark.parametrize(("service", "is_ended"), [("runner", True), ("agent", False)])
def test_program_that_fails_for_want_of_answers_has_an_episode_that_was_ended(service: str, is_ended: bool) -> None:
    failure = EpisodeFailure(service, "spec.agent", "exception", "IndexError")
    turns = [Turn("3", reward=0.5), Turn("", truncated=True)]
    messages = [*MESSAGES, {"role": "assistant", "content": "3"}, {"role": "assistant", "content": ""}]
    episode = Episode(0, 0, 0, turns=turns, messages=messages, end=EpisodeEnd.FAILED, failure=failure)
    end_after_given_answers(episode)
    assert ([turn.text for turn in episode.turns], episode.messages[-1]["content"]) == (["3"], "3")
    assert (episode.failure is None, episode.end is EpisodeEnd.MAX_TURNS) == (is_ended, is_ended)
