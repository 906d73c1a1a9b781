"""Chat messages of a row: text in parts becomes text, and a last answer of the assistant is never part of the prompt.

Pure. Invariant: the content of a message that is returned has no parts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rljob_api.wire.base import Message
from rljob_inputs.findings import InputError

_ANSWERING = "assistant"


def are_messages(prompt: Any) -> bool:
    return (
        _is_list(prompt)
        and bool(prompt)
        and all(isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in prompt)
    )


def is_sharegpt(prompt: Any) -> bool:
    return _is_list(prompt) and any(isinstance(each, Mapping) and {"from", "value"} <= each.keys() for each in prompt)


def ends_with_answer(prompt: Any) -> bool:
    return are_messages(prompt) and prompt[-1]["role"] == _ANSWERING


def split_answer(prompt: Sequence[Mapping[str, Any]], place: str, field: str) -> tuple[list[Message], Message]:
    """Return the messages before the assistant's last one, and that one. Raise InputError if there is none."""
    messages = read_messages(prompt, place, field)
    if len(messages) < 2 or messages[-1]["role"] != _ANSWERING:
        role = messages[-1]["role"]
        problem = f"the last of several messages must be the assistant's to be the answer, got {len(messages)}"
        raise InputError(field, f"{place}: {problem}, and the last is of {role}; name another column")
    return messages[:-1], messages[-1]


def read_messages(prompt: Sequence[Mapping[str, Any]], place: str, field: str) -> list[Message]:
    """Return the messages with text as content. Raise InputError if a part is not text, such as an image."""
    return [{**message, "content": _read_content(message["content"], place, field)} for message in prompt]


def _read_content(content: Any, place: str, field: str) -> Any:
    if not _is_list(content):
        return content
    return "".join(_read_part(part, place, field) for part in content)


def _read_part(part: Any, place: str, field: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(text, str):
        return text
    problem = f"a message has a part of type {kind}"
    if kind == "text":
        problem = "a message has a part of type text without text"
    raise InputError(field, f"{place}: {problem}; only text trains, no images, audio or video: remove these rows")


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
