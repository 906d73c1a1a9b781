"""Prompts as text and as messages, and abbreviated answers for error messages."""

from __future__ import annotations

from typing import Any

from rljob_api.wire.protocol import Message

_MAX_SHOWN_CHARACTERS = 200


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


def describe(value: Any) -> str:
    """Return the beginning of an answer, for error messages."""
    text = " ".join(str(value).split())
    return repr(text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}...")
