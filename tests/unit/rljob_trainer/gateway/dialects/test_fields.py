"""What all dialects read in the same way."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.gateway.dialects import fields
from rljob_trainer.gateway.types import RequestError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def test_text_of_parts_is_joined_by_newlines():
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, {"type": "refusal", "refusal": "c"}]

    assert fields.read_text(parts, "content") == "a\nb\nc"
    assert fields.read_text("a", "content") == "a"
    assert fields.read_text(None, "content") == ""


def test_an_image_is_refused_with_its_path():
    with pytest.raises(RequestError, match=r'messages\[1\].content\[0\].type: "image_url" is not supported') as caught:
        fields.read_text([{"type": "image_url", "image_url": {"url": "x"}}], "messages[1].content")

    assert caught.value.status == 400


def test_a_tool_needs_a_name():
    with pytest.raises(RequestError, match=r"tools\[0\].name"):
        fields.read_tool(None, None, None, "tools[0]")


def test_a_tool_without_parameters_has_no_arguments():
    assert fields.read_tool("now", None, None, "tools[0]").parameters == {"type": "object", "properties": {}}


@pytest.mark.parametrize("value", [0, -1, 1.5, "7", True])
def test_a_limit_is_a_whole_number(value):
    with pytest.raises(RequestError, match="max_tokens: must be a whole number of at least 1"):
        fields.read_count(value, "max_tokens")


def test_stop_is_a_text_or_a_list():
    assert fields.read_stop("END", "stop") == ["END"]
    assert fields.read_stop(["a", "", "b"], "stop") == ["a", "b"]
    assert fields.read_stop(None, "stop") == []
    with pytest.raises(RequestError, match=r"stop\[0\]"):
        fields.read_stop([3], "stop")


def test_leading_system_messages_are_one():
    system = [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}]
    user = {"role": "user", "content": "c"}

    assert fields.join_leading_system([*system, user, system[0]]) == [
        {"role": "system", "content": "a\n\nb"},
        user,
        system[0],
    ]
    assert fields.join_leading_system([user]) == [user]


@given(JSON)
def test_an_event_is_one_line_of_data(value):
    event = fields.write_event({"value": value}, "name")

    assert event.endswith(b"\n\n")
    name, data = event.removesuffix(b"\n\n").split(b"\n")
    assert name == b"event: name"
    assert json.loads(data.removeprefix(b"data: ")) == {"value": value}
