"""The JSON of a call and of its response."""

import json

import pytest

from rljob_api.wire.protocol import CallRequest, InvalidReason
from rljob_trainer.calls.messages import FunctionCall

CALL = FunctionCall(CallRequest(id="e/0", lane="eval", function="add", arguments={"a": "\ud83d"}))


def test_body_has_the_call_and_no_half_of_a_character():
    assert json.loads(CALL.encode()) == {"id": "e/0", "lane": "eval", "function": "add", "arguments": {"a": "?"}}


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
