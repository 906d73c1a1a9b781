"""Requests to vLLM, and responses as a stream of events."""

import json

import pytest

from rljob_api.errors import UserError
from rljob_api.manifest.roles import Sampling
from rljob_trainer.replicas.generate import ResponseReader, UnusableResponseError, build_payload


def choice(**fields):
    base = {"text": "31", "token_ids": [5, 6, 2], "finish_reason": "stop"}
    logprobs = {"content": [{"logprob": value} for value in (-0.1, -0.2, -0.3)]}
    spans = [{"version": "g-x:1", "start": 0, "end": 2}, {"version": "g-x:2", "start": 2, "end": 3}]
    return base | {"logprobs": logprobs, "weight_versions": spans} | fields


def read(*choices):
    reader = ResponseReader()
    for each in choices:
        reader.add_line(f"data: {json.dumps({'choices': [each]})}\n".encode())
        reader.add_line(b"\n")
    reader.add_line(b": a comment")
    reader.add_line(b"data: [DONE]\n")
    return reader.finish()


def test_payload_requests_sampled_tokens_and_their_log_probs():
    payload = build_payload([1, 2], Sampling(temperature=0.7, top_k=5, stop=["\n"], max_tokens=9), 7, "g:3")
    assert (payload["token_ids"], payload["stream"], payload["output_mode"]) == ([1, 2], True, "text")
    assert payload["cache_salt"] == "g:3", "else a prefix that older weights computed is used"
    sampling = payload["sampling_params"]
    assert (sampling["logprobs"], sampling["seed"], sampling["max_tokens"]) == (0, 7, 9)
    assert (sampling["temperature"], sampling["top_k"], sampling["stop"]) == (0.7, 5, ["\n"])


def test_the_text_of_a_special_token_stands_for_the_token():
    special = {"<|im_end|>": 2, "<|eot_id|>": 9}
    sampling = Sampling(stop=["END", "<|im_end|>"], max_tokens=9)
    found = build_payload([1], sampling, 7, "g:3", special)["sampling_params"]
    assert (found["stop"], found["stop_token_ids"]) == (["END"], [2])
    found = build_payload([1], sampling, 7, "g:3")["sampling_params"]
    assert (found["stop"], found["stop_token_ids"]) == (["END", "<|im_end|>"], [])


def test_completion_keeps_its_end_of_sequence_token_and_has_a_version_for_each_token():
    found = read(choice())
    assert (found.token_ids, found.logprobs) == ([5, 6, 2], [-0.1, -0.2, -0.3])
    assert (found.versions, found.generation) == ([1, 1, 2], "g-x")
    assert not found.truncated
    assert read(choice(finish_reason="length")).truncated


def test_events_are_put_together():
    pieces = [
        choice(
            text=text,
            token_ids=[token],
            logprobs={"content": [{"logprob": -float(token)}]},
            finish_reason="stop" if token == 3 else None,
            weight_versions=[{"version": "g:0", "start": 0, "end": 3}] if token == 3 else None,
        )
        for token, text in ((1, "a"), (2, ""), (3, "b"))
    ]
    tail = choice(text="c", token_ids=[], logprobs={"content": []}, finish_reason=None, weight_versions=None)
    found = read(tail, *pieces)
    assert (found.token_ids, found.logprobs, found.text) == ([1, 2, 3], [-1.0, -2.0, -3.0], "cab")
    assert found.versions == [0, 0, 0]


UNUSABLE = {
    "aborted": {"finish_reason": "abort"},
    "a token without log-prob": {"token_ids": [5, 6, 7, 2]},
    "not a number": {"logprobs": {"content": [{"logprob": -0.1}, {"logprob": -9999.0}, {"logprob": -0.1}]}},
    "initial weights": {"weight_versions": [{"version": "default", "start": 0, "end": 3}]},
    "no versions": {"weight_versions": None},
    "a token without version": {"weight_versions": [{"version": "g:1", "start": 0, "end": 2}]},
    "two generations": {
        "weight_versions": [{"version": "g:1", "start": 0, "end": 2}, {"version": "h:0", "start": 2, "end": 3}]
    },
}


@pytest.mark.parametrize("fields", UNUSABLE.values(), ids=UNUSABLE)
def test_response_that_cannot_be_trained_on_is_rejected(fields):
    with pytest.raises(UnusableResponseError):
        read(choice(**fields))


def test_response_without_an_end_is_rejected():
    with pytest.raises(UnusableResponseError, match="ended before"):
        read(choice(finish_reason=None))


@pytest.mark.parametrize(
    ("code", "error", "match"),
    [(400, UserError, "too long"), (401, UserError, "RLJOB_TOKEN"), (500, UnusableResponseError, "bad")],
)
def test_error_in_the_stream_is_the_users_or_temporary(code, error, match):
    with pytest.raises(error, match=match):
        ResponseReader().add_line(b'data: {"error": {"message": "bad", "code": %d}}' % code)
