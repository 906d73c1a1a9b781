"""A conversation from the other side, and what the model's text becomes. Pure.

For the model, the user's messages are the assistant's, and what the policy wrote comes as messages of the user. Roles
alternate and the first message is the policy's, as many chat templates require.
"""

from collections.abc import Sequence
from typing import Any

from rljob_api.wire.base import InvalidReason, Message
from rljob_api.wire.calls import UserReply
from rljob_service.models.execution import NoScoreError
from rljob_service.models.texts import content_of, drop_reasoning
from rljob_service.worker.forms.outcome import encodable

OPENING = "Hello! How can I help you?"
"""What the policy says before the user's first message."""
_EMPTY = "(an empty message)"
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


def read_reply(text: str, stop: str | None, state: dict[str, Any]) -> UserReply:
    """Return the user's turn. Raises NoScoreError if the text has only reasoning."""
    text = encodable(drop_reasoning(text))
    if stop is not None and stop in text:
        return UserReply(text=None, state=state, info={"last_message": text})
    if not text:
        raise NoScoreError(InvalidReason.EMPTY, "the user's answer is empty, except for its reasoning")
    return UserReply(text=text, state=state)
