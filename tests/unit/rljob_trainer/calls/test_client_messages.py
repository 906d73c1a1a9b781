"""The JSON of a call and of its response."""

import json

import pytest

from rljob_api.wire.base import InvalidReason
from rljob_api.wire.calls import CallRequest
from rljob_api.wire.contract import MAX_EPISODE_REPLY_BYTES
from rljob_trainer.calls.client import EpisodeRequest, FunctionCall

CALL = FunctionCall(CallRequest(id="e/0", lane="eval", function="add", arguments={"a": "\ud83d"}))


def test_body_has_the_call_and_no_half_of_a_character():
    body = {"id": "e/0", "lane": "eval", "function": "add", "episode": "", "arguments": {"a": "?"}}
    assert json.loads(CALL.encode()) == body


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object()])
def test_arguments_without_json_form_are_refused(value):
    with pytest.raises(ValueError, match=r".+"):
        FunctionCall(CallRequest(id="e", arguments={"a": value})).encode()


def test_response_has_the_value():
    [result] = CALL.read('{"id": "e/0", "valid": true, "value": "4", "new_field": 1}', 0.5)
    assert (result.valid, result.value) == (True, "4")


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"id": "other", "valid": true}', '{"id": "e/0", "valid": true, "reason": "timeout"}',
     '{"id": "e/0", "valid": false}', "[" * 100_000],
)  # fmt: skip
def test_response_that_breaks_the_protocol_is_invalid(text):
    [result] = CALL.read(text, 0.5)
    assert (result.id, result.valid, result.reason) == ("e/0", False, InvalidReason.BAD_RETURN)
    assert result.message.startswith("invalid response")


class Attempts:
    """Implements agents.base.EpisodeMessage."""

    id, lane = "e/0", "eval"
    num_attempts = 0

    def next_attempt(self):
        self.num_attempts += 1
        return CallRequest(id=self.id, lane=self.lane, arguments={"attempt": self.num_attempts - 1})


def test_each_body_of_an_episode_is_another_attempt_with_the_same_id():
    episode = EpisodeRequest(Attempts())
    assert (episode.request.id, episode.lane, episode.path, episode.num_results) == ("e/0", "eval", "/v1/call", 1)
    bodies = [json.loads(episode.encode()) for _ in range(2)]
    assert [body["arguments"] for body in bodies] == [{"attempt": 0}, {"attempt": 1}]
    assert {body["id"] for body in bodies} == {"e/0"}
    [result] = episode.read('{"id": "e/0", "valid": true, "value": {"reward": 1}}', 0.5)
    assert result.value == {"reward": 1}


def test_longest_reply_of_an_episode_fits_a_response():
    assert EpisodeRequest(Attempts()).max_response_bytes > MAX_EPISODE_REPLY_BYTES
