"""A conversation as the model that plays the user sees it, and how its text becomes a reply."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_service.models.execution import NoScoreError
from rljob_service.models.user.conversation import OPENING, read_reply, swap_roles

CALL = {"id": "call_0", "type": "function", "function": {"name": "search", "arguments": {}}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


OPENED = user(OPENING)


@pytest.mark.parametrize(
    ("messages", "swapped"),
    [
        (
            [user("2+2?"), assistant("3"), user("Wrong."), assistant("4")],
            [OPENED, assistant("2+2?"), user("3"), assistant("Wrong."), user("4")],
        ),
        (
            [{"role": "system", "content": "Be brief."}, user("2+2?"), assistant("4")],
            [OPENED, assistant("2+2?"), user("4")],
        ),
        (
            [assistant("Hi, I am Bob."), user("2+2?"), assistant("4")],
            [user("Hi, I am Bob."), assistant("2+2?"), user("4")],
        ),
        ([user("a"), user("b"), assistant("c")], [OPENED, assistant("a\n\nb"), user("c")]),
    ],
)
def test_roles_are_swapped_and_alternate_after_the_policys_first_message(messages, swapped):
    assert swap_roles(messages) == swapped


def test_only_the_text_of_what_the_policy_did_with_tools_is_shown():
    result = {"role": "tool", "tool_call_id": "call_0", "name": "search", "content": "{}"}
    messages = [
        user("2+2?"),
        assistant("Let me look.", tool_calls=[CALL]),
        result,
        assistant(None, tool_calls=[CALL]),
        result,
        assistant("4"),
    ]
    assert swap_roles(messages) == [OPENED, assistant("2+2?"), user("Let me look.\n\n4")]


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        ("<think>2+2=4</think>\n\n4", "4"),
        ("2+2=4</think>4", "4"),
        ("<think>2+2=", "(an empty message)"),
        ("", "(an empty message)"),
    ],
)
def test_reasoning_of_the_policy_is_not_shown(answer, shown):
    assert swap_roles([user("2+2?"), assistant(answer)])[-1] == user(shown)


@pytest.mark.parametrize(
    ("text", "stop", "sent", "info"),
    [
        (" No.\n", "[DONE]", "No.", {}),
        ("Thanks! [DONE]", "[DONE]", None, {"last_message": "Thanks! [DONE]"}),
        ("Thanks! [DONE]", None, "Thanks! [DONE]", {}),
        ("<think>is it [DONE]?</think>No.", "[DONE]", "No.", {}),
        ("<think>good</think>[DONE]", "[DONE]", None, {"last_message": "[DONE]"}),
        ("half \ud83d", None, "half ?", {}),
    ],
)
def test_stop_text_ends_the_conversation_and_nothing_of_it_is_sent(text, stop, sent, info):
    reply = read_reply(text, stop, {"tries": 1})
    assert (reply.text, reply.info, reply.reward, reply.state) == (sent, info, None, {"tries": 1})


@pytest.mark.parametrize("text", ["<think>hm", "<think>hm</think>\n", " "])
def test_a_text_of_reasoning_alone_is_not_the_end_of_the_conversation(text):
    with pytest.raises(NoScoreError, match="answer is empty, except for its reasoning"):
        read_reply(text, "[DONE]", {})
