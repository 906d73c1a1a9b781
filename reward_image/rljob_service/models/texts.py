"""Prompts and completions as text and as messages, and abbreviated answers for error messages.

Models see all that followed the prompt of an agent's episode, as in verl, TRL and OpenRLHF.
"""

from typing import Any

from rljob_api.wire.base import Message
from rljob_api.wire.scores import ScoreRequest

_MAX_SHOWN_CHARACTERS = 200
_REASONING_STARTS, _REASONING_ENDS = "<think>", "</think>"


def to_messages(prompt: str | list[Message]) -> list[Message]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def content_of(message: Message) -> str:
    return str(message.get("content") or "")


def to_text(prompt: str | list[Message]) -> str:
    """Return the prompt as text: for a conversation, its last user message."""
    if isinstance(prompt, str):
        return prompt
    messages = [message for message in prompt if message.get("role") == "user"] or prompt
    return content_of(messages[-1]) if messages else ""


def completion_text(request: ScoreRequest) -> str:
    return request.completion if request.whole is None else request.whole.text


def completion_messages(request: ScoreRequest) -> list[Message]:
    return [{"role": "assistant", "content": request.completion}] if request.whole is None else request.whole.messages


def drop_reasoning(text: str) -> str:
    """Return what follows the reasoning, which some templates begin before the answer; empty if it has no end."""
    rest = text.rpartition(_REASONING_ENDS)[2].strip()
    return "" if rest.startswith(_REASONING_STARTS) else rest


def describe(value: Any) -> str:
    """Return the beginning of an answer, for error messages."""
    text = " ".join(str(value).split())
    return repr(text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}...")
