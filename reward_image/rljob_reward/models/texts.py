"""Prompts as text and as turns, and the beginnings of answers for messages."""

from __future__ import annotations

from typing import Any

from rljob_api.wire.protocol import Message

_SHOWN_CHARACTERS = 200


def turns_of(prompt: str | list[Message]) -> list[Message]:
    """The prompt as a conversation."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def text_of(prompt: str | list[Message]) -> str:
    """The prompt as text; of a conversation, what its last user turn says."""
    if isinstance(prompt, str):
        return prompt
    turns = [turn for turn in prompt if turn.get("role") == "user"] or prompt
    return str(turns[-1].get("content") or "") if turns else ""


def describe(value: Any) -> str:
    """The beginning of an answer, for messages."""
    text = " ".join(str(value).split())
    return repr(text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}...")
