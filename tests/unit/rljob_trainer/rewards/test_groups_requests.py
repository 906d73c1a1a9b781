"""From episodes to requests: the last answer, and the whole conversation in the forms that projects pass to rewards."""

import numpy as np
import pytest

from rljob_inputs.prompts import Prompt
from rljob_trainer.episodes.types import ContextBreak, Episode, EpisodeEnd, Segment, ToolCall, Turn, Whole
from rljob_trainer.rewards.groups import RequestBuilder
from rljob_trainer.rewards.messages import RewardCall
from tests.support.episodes import episode

PROMPT = Prompt(7, "2+2?", [1, 2], ground_truth="4", answer_column="sum", extra_info={"level": 3})


class Decoder:
    """Token 3 is special."""

    def decode(self, token_ids, *, skip_special_tokens):
        return " ".join(str(each) for each in token_ids if each != 3 or not skip_special_tokens)


def build(ended, prompt=PROMPT, choice=None):
    return RequestBuilder(Decoder(), choice).build("g/train/1/0/1", "train", prompt, ended)


def talk(**fields):
    """Return an episode of two answers, [5, 3] and [8, 9, 3], in one segment, after the prompt [1, 2]."""
    segment = Segment(
        [1, 2, 5, 3, 6, 8, 9, 3],
        [0, 0, 1, 1, 0, 1, 1, 1],
        [0.0] * 8,
        [0] * 8,
        [-1, -1, 0, 0, -1, 1, 1, 1],
    )
    call = ToolCall("call_0_0", "add", {"a": 1}, error="timeout: 30 s", seconds=30.0, tool="calc")
    turns = [Turn("a", reward=-0.5, tool_calls=[call]), Turn("b")]
    after = [
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "b"},
    ]
    whole = Whole(np.array([1, 2]), np.array([5, 3, 6, 8, 9, 3]), after)
    messages = [{"role": "user", "content": "2+2?"}, *after]
    given = {"whole": whole, "messages": messages, "state": {"tries": 2}, "end": EpisodeEnd.USER}
    return Episode(7, 0, 1, [segment], turns, **{**given, **fields})


def test_request_has_the_steps_of_the_job_for_servers_that_read_them():
    builder = RequestBuilder(Decoder(), total_steps=9)
    request = builder.build("g/train/1/0/1", "train", PROMPT, episode([1, 2], [0, 1], index=(7, 0, 1)), 4)
    sent = RewardCall(request).payload(["steps"])
    assert (sent["finished_steps"], sent["total_steps"]) == (4, 9)
    assert not {"finished_steps", "total_steps"}.intersection(RewardCall(request).payload(["whole"]))


def test_a_teacher_gets_each_segment_with_its_sampled_tokens_and_their_texts():
    first = talk().segments[0]
    second = Segment([1, 2, 7], [0, 0, 0], [0.0] * 3, [0] * 3, [-1] * 3)
    ended = talk()
    ended.segments.append(second)
    request = RequestBuilder(Decoder(), has_teacher=True).build("g/train/1/0/1", "train", PROMPT, ended)
    sent = RewardCall(request).payload(["segments"])["segments"]
    assert [each["token_ids"] for each in sent] == [[1, 2, 5, 3, 6, 8, 9, 3], [1, 2, 7]]
    assert [each["sampled"] for each in sent] == [[[2, 4], [5, 8]], []]
    assert sent[1]["texts"] == ["1", "2", "7"]
    assert "segments" not in RewardCall(request).payload(["tokens"]), "other servers do not read them"
    more = RewardCall(request).max_response_bytes - RewardCall(build(ended)).max_response_bytes
    assert more >= len(first.token_ids) * 16 / 3, "a response has a log-prob of each token"


def test_request_of_one_answer_has_the_row_and_the_token_ids():
    request = build(episode([1, 2, 8, 9], [0, 0, 1, 1], text="4", index=(7, 0, 1)))
    assert request.model_dump(exclude_defaults=True) == {
        "id": "g/train/1/0/1",
        "prompt": "2+2?",
        "completion": "4",
        "ground_truth": "4",
        "answer_column": "sum",
        "extra_info": {"level": 3, "truncated": False, "num_tokens": 2},
        "prompt_ids": [1, 2],
        "completion_ids": [8, 9],
        "finished_steps": 0,
        "total_steps": 0,
    }


def test_request_of_a_conversation_has_the_last_answer_and_the_episode():
    request = build(talk(), Prompt(7, [], [1, 2], extra_info={"level": 3}))
    assert (request.completion, request.prompt_ids, request.completion_ids) == ("b", [1, 2, 5, 3, 6], [8, 9, 3])
    call = {"name": "add", "arguments": {"a": 1}, "error": "timeout: 30 s"}
    assert request.extra_info == {
        "level": 3,
        "truncated": False,
        "num_tokens": 5,
        "messages": talk().messages,
        "turns": [
            {"text": "a", "reward": -0.5, "tool_calls": [call]},
            {"text": "b", "reward": None, "tool_calls": []},
        ],
        "state": {"tries": 2},
        "end": "user",
    }


def test_request_of_a_conversation_has_all_that_followed_the_prompt():
    whole = build(talk()).whole
    assert whole.text == "5 6 8 9", "from the first sampled token to the end, without special tokens"
    assert whole.messages == talk().messages[1:]
    assert (whole.prompt_ids, whole.completion_ids) == ([1, 2], [5, 3, 6, 8, 9, 3])


@pytest.mark.parametrize(
    ("choice", "completion", "has_whole", "ids"),
    [
        (None, "b", True, ([1, 2, 5, 3, 6], [8, 9, 3])),
        ("last", "b", False, ([1, 2, 5, 3, 6], [8, 9, 3])),
        ("all", "5 6 8 9", True, ([1, 2], [5, 3, 6, 8, 9, 3])),
    ],
)
def test_job_may_choose_the_completion_for_all_rewards(choice, completion, has_whole, ids):
    request = build(talk(), choice=choice)
    assert (request.completion, request.whole is not None) == (completion, has_whole)
    assert (request.prompt_ids, request.completion_ids) == ids


def test_episode_without_an_answer_has_no_whole_completion():
    segment = Segment([1, 2], [0, 0], [0.0] * 2, [-1] * 2, [-1] * 2)
    request = build(Episode(7, 0, 1, [segment], messages=[{"role": "user", "content": "2+2?"}]), choice="all")
    assert (request.completion, request.whole, request.completion_ids) == ("", None, [])


def test_request_has_the_prompt_of_the_last_segment():
    ended = talk(breaks=[ContextBreak("history")])
    ended.segments.append(Segment([3, 4], [0, 1], [0.0] * 2, [0] * 2, [-1, 2]))
    request = build(ended)
    assert (request.prompt_ids, request.completion_ids) == ([3], [4])


def test_request_has_the_tokens_of_the_last_answer_wherever_its_segment_is():
    ended = talk(breaks=[ContextBreak("branch")])
    ended.segments.insert(1, Segment([3, 4], [0, 1], [0.0] * 2, [0] * 2, [-1, 0]))
    request = build(ended)
    assert (request.prompt_ids, request.completion_ids) == ([1, 2, 5, 3, 6], [8, 9, 3])
