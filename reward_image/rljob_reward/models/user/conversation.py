"""A conversation from the other side, and what the model's text becomes. Pure.

For the model, the user's messages are the assistant's, and what the policy wrote comes as messages of the user. Roles
alternate and the first message is the policy's, as many chat templates require.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rljob_api.wire.protocol import InvalidReason, Message, UserReply
from rljob_reward.models.execution import NoScoreError
from rljob_reward.models.texts import content_of
from rljob_reward.worker.adapters.outcome import encodable

OPENING = "Hello! How can I help you?"
"""What the policy says before the user's first message."""
_EMPTY = "(an empty message)"
_REASONING_STARTS, _REASONING_ENDS = "<think>", "</think>"
_SWAPPED = {"user": "assistant", "assistant": "user"}


def swap_roles(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation for the model that plays the user. System messages, calls of tools and their results are
    not shown, nor the policy's reasoning."""
    swapped: list[Message] = []
    for message in messages:
        role = _SWAPPED.get(str(message.get("role")))
        text = drop_reasoning(content_of(message)) if role == "user" else content_of(message)
        if role is None or (not text and message.get("tool_calls")):
            continue
        text = text or _EMPTY
        if swapped and swapped[-1]["role"] == role:
            swapped[-1]["content"] += f"\n\n{text}"
        else:
            swapped.append({"role": role, "content": text})
    if not swapped or swapped[0]["role"] != "user":
        swapped.insert(0, {"role": "user", "content": OPENING})
    return swapped


def drop_reasoning(text: str) -> str:
    """Return what follows the reasoning, which some templates begin before the answer; empty if it has no end."""
    rest = text.rpartition(_REASONING_ENDS)[2].strip()
    return "" if rest.startswith(_REASONING_STARTS) else rest


def read_reply(text: str, stop: str | None, state: dict[str, Any]) -> UserReply:
    """Return the user's turn. Raises NoScoreError if the text has only reasoning."""
    text = encodable(drop_reasoning(text))
    if stop is not None and stop in text:
        return UserReply(text=None, state=state, info={"last_message": text})
    if not text:
        raise NoScoreError(InvalidReason.BAD_RETURN, "the user's answer is empty, except for its reasoning")
    return UserReply(text=text, state=state)
