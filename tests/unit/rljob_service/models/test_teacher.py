"""A teacher at a fake endpoint. tests/integration/test_judges_real.py uses a real vLLM."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from rljob_api.errors import UserError
from rljob_api.wire.scores import ScoreRequest, TokenSegment
from rljob_service.models import teacher
from rljob_service.models.execution import NoScoreError
from rljob_service.models.teacher import find_other_text, list_segments

TEXTS = {1: "one", 2: " two", 3: " three", 4: "\ufffd"}


def answer(body: dict[str, Any], number: int) -> web.Response:
    """As vLLM: the log-prob of token n is -n / 4, and that of the first token is unknown."""
    if body["prompt"] == "Hello":
        return web.json_response({"choices": [{"prompt_logprobs": [None]}]})
    entries = [
        {str(n): {"logprob": -n / 4, "rank": 1, "decoded_token": TEXTS[n]}, "99": {"logprob": -0.1}}
        for n in body["prompt"]
    ]
    return web.json_response({"choices": [{"prompt_logprobs": [None, *entries[1:]]}], "usage": {"prompt_tokens": 9}})


@pytest.fixture
async def start(make_reward, endpoint):
    """start(answer): a teacher whose endpoint answers so."""
    asked = {"url": endpoint.url, "model": "big", "limits": {"concurrency": 1}}

    async def begin(reply=answer, **fields):
        endpoint.reset(reply)
        return await make_reward({"name": "t", "teacher": {"endpoint": asked, **fields}, "timeoutSeconds": 20})

    return begin


def decode(texts):
    return [np.frombuffer(base64.b64decode(each), "<f4").tolist() for each in texts]


async def test_each_sampled_token_gets_its_log_prob(start, endpoint):
    served = await start()
    first = TokenSegment(token_ids=[1, 2, 3, 1, 2, 1, 1], sampled=[(2, 4), (4, 5)], texts=[])
    second, third = TokenSegment(token_ids=[3, 1], sampled=[(1, 2)]), TokenSegment(token_ids=[3, 3], sampled=[])
    result = await served.score("", segments=[first, second, third])
    assert decode(result.logprobs) == [[-0.75, -0.25, -0.5], [-0.25], []]
    assert result.score == pytest.approx(-(0.75 + 0.25 + 0.5 + 0.25) / 4)
    sent = endpoint.requests
    assert [each["prompt"] for each in sent] == [[1, 2, 3, 1, 2], [3, 1]], "what follows the last sampled token is cut"
    assert all((each["max_tokens"], each["prompt_logprobs"], each["model"]) == (1, 0, "big") for each in sent)


async def test_with_top_k_each_sampled_token_gets_the_likeliest_after_its_own(start, endpoint):
    served = await start(topK=2)
    result = await served.score("", segments=[TokenSegment(token_ids=[1, 2, 3], sampled=[(1, 3)])])
    dtype = np.dtype([("logprob", "<f4"), ("top", [("token", "<i4"), ("logprob", "<f4")], (2,))])
    records = np.frombuffer(base64.b64decode(result.logprobs[0]), dtype)
    assert records["logprob"].tolist() == [-0.5, -0.75]
    likeliest = (99, np.float32(-0.1))
    assert records["top"].tolist() == [[likeliest, (2, -0.5)], [likeliest, (3, -0.75)]]
    assert result.score == pytest.approx(-(0.5 + 0.75) / 2)
    assert endpoint.requests[-1]["prompt_logprobs"] == 2
    result = await (await start(topK=3)).score("", prompt_ids=[1], completion_ids=[2])
    assert (result.valid, result.reason) == (False, "bad_return"), "the endpoint returns fewer"


async def test_a_request_of_prompt_and_completion_is_one_segment(start, endpoint):
    result = await (await start()).score("x", prompt_ids=[1, 2], completion_ids=[3, 1])
    assert decode(result.logprobs) == [[-0.75, -0.25]]
    assert endpoint.requests[-1]["prompt"] == [1, 2, 3, 1]


async def test_another_text_of_a_token_ends_the_server_with_both_texts(start, monkeypatch):
    errors: list[Exception] = []
    built = teacher.Teacher.__init__
    monkeypatch.setattr(teacher.Teacher, "__init__", lambda self, *args: built(self, *args[:-1], errors.append))
    served = await start()
    same = TokenSegment(token_ids=[1, 2, 4], sampled=[(1, 3)], texts=["1st", "two", "anything"])
    assert (await served.score("", segments=[same])).valid, "the first token is not known, nor half a character"
    other = same.model_copy(update={"texts": ["one", "zwei", "x"]})
    result = await served.score("", segments=[other])
    assert not result.valid
    [error] = errors
    assert isinstance(error, UserError)
    assert (
        str(error) == "teacher reads token 2 as ' two', which is 'zwei' to the policy; it needs the policy's tokenizer"
    )


@pytest.mark.parametrize(
    ("reply", "status", "reason", "message"),
    [
        ({"choices": [{"text": "x"}]}, 200, "bad_return", "no log-probs of the prompt's tokens: "),
        ({"choices": [{"prompt_logprobs": [None, {"7": {"logprob": -1}}]}]}, 200, "bad_return", "no log-probs"),
        ({"choices": [{"prompt_logprobs": [None]}]}, 200, "bad_return", "no log-probs"),
        ({"error": {"message": "maximum context length is 2"}}, 400, "exception", "maximum context length is 2"),
    ],
)
async def test_an_answer_without_log_probs_is_invalid(start, endpoint, reply, status, reason, message):
    served = await start()
    endpoint.answer = lambda body, number: web.json_response(reply, status=status)
    result = await served.score("", prompt_ids=[1], completion_ids=[2])
    assert (result.valid, result.reason, result.logprobs) == (False, reason, None)
    assert message in result.message


async def test_log_probs_that_are_not_finite_are_invalid(start, endpoint):
    served = await start()
    text = '{"choices": [{"prompt_logprobs": [null, {"2": {"logprob": -Infinity}}]}]}'
    endpoint.answer = lambda body, number: web.Response(text=text)
    assert (await served.score("", prompt_ids=[1], completion_ids=[2])).reason == "not_finite"


async def test_an_episode_without_an_answer_asks_nothing(start, endpoint):
    result = await (await start()).score("", segments=[TokenSegment(token_ids=[1], sampled=[])])
    assert (result.valid, result.score, len(endpoint.requests)) == (True, 0.0, 0)


def test_a_request_needs_token_ids():
    with pytest.raises(NoScoreError, match="needs segments, or prompt_ids and completion_ids"):
        list_segments(ScoreRequest(id="1", prompt="p", completion="c"))


def test_what_decoders_do_to_spaces_is_no_other_text():
    segment = TokenSegment(token_ids=[1, 2], sampled=[], texts=["x", "."])
    assert find_other_text(segment, [None, {"decoded_token": " ."}]) == ""
    assert find_other_text(segment, [None, {"decoded_token": None}]) == "", "a server that tells no texts"
