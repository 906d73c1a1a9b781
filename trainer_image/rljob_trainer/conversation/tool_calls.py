"""Tool calls in the text of an answer, as vLLM's parsers `hermes` and `llama3_json` read them. Pure.

    hermes   text <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call> <tool_call>...</tool_call>
    llama3   {"name": "add", "parameters": {"a": 1}}; {"name": ...}

One difference: where vLLM returns the whole answer as content because a call is malformed, `parse` returns that call
without arguments, so that the model can get the error as its result.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from rljob_api.errors import UserError

ToolFormat = Literal["hermes", "llama3"]

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
_HERMES_CALL = re.compile(rf"{CALL_START}(.*?)(?:{CALL_END}|\Z)", re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"
_LLAMA_HEADER = "<|start_header_id|>"
_LLAMA_KEYS = ("arguments", "parameters")
_LLAMA_ATTEMPT = re.compile(r'\s*\{\s*"(name|type)"')
"""An answer that begins like a call. Other braces, such as LaTeX or code, are content."""
_OTHER_FORMATS = ("<function=", "[TOOL_CALLS]", "<｜tool▁call", "<|tool_call", "functools[", "<|channel|>", "<invoke")
_DECODER = json.JSONDecoder()
_MAX_NESTING = 64
"""Limit of arguments that the policy wrote: servers do not read JSON with more levels."""


@dataclass(frozen=True)
class ParsedCall:
    """One call that the policy wrote."""

    name: str
    """Empty if it cannot be read."""
    arguments: dict[str, Any] | None
    """None: the text is not a JSON object with a name and an object of arguments."""
    text: str
    """As the policy wrote it."""


@dataclass(frozen=True)
class Answer:
    content: str
    """What is not a call. With hermes: the text before the first one."""
    calls: list[ParsedCall] = field(default_factory=list)


def find_format(template_text: str) -> ToolFormat:
    """Return how a model with this chat template writes its calls. UserError if it is neither of the two."""
    if re.search(r"\btools\b", template_text) is None:
        return "hermes"  # ChatTemplate writes the tools, in this format.
    if not any(marker in template_text for marker in _OTHER_FORMATS):
        if CALL_START in template_text:
            return "hermes"
        if _LLAMA_HEADER in template_text or _PYTHON_TAG in template_text:
            return "llama3"
    raise UserError(
        "spec.agent.toolFormat: auto does not recognize how the model writes tool calls; "
        "set hermes or llama3, or use a model of Qwen 2.5, Qwen 3, SmolLM or Llama 3"
    )


def is_json(value: object, depth: int = 0) -> bool:
    """Return whether any JSON parser reads it: Python's also reads NaN and Infinity, and hundreds of levels."""
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return depth < _MAX_NESTING and all(is_json(each, depth + 1) for each in inner)
    return not isinstance(value, float) or abs(value) < float("inf")  # NaN is not less


def parse(text: str, tool_format: ToolFormat) -> Answer:
    """Return the content and the calls of an answer, which is without special tokens."""
    return _parse_hermes(text) if tool_format == "hermes" else _parse_llama3(text)


def _parse_hermes(text: str) -> Answer:
    start = text.find(CALL_START)
    if start < 0:
        return Answer(text)
    calls = [_read_call(body, _load(body), ("arguments",)) for body in _HERMES_CALL.findall(text)]
    return Answer(text[:start], calls)


def _parse_llama3(text: str) -> Answer:
    """Read each JSON object at the top level. Text around them is dropped, as vLLM does."""
    calls: list[ParsedCall] = []
    position = text.find("{")
    while position >= 0:
        try:
            value, end = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError):
            value, end = None, len(text)
        is_call = _has_name(value) and any(key in value for key in _LLAMA_KEYS)
        if not is_call and _LLAMA_ATTEMPT.match(text.strip().removeprefix(_PYTHON_TAG)) is None:
            return Answer(text)
        calls.append(_read_call(text[position:end], value, _LLAMA_KEYS))
        position = text.find("{", end)
    return Answer("" if calls else text, calls)


def _load(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _read_call(text: str, value: Any, keys: tuple[str, ...]) -> ParsedCall:
    if not _has_name(value):
        return ParsedCall("", None, text)
    arguments = next((value[key] for key in keys if key in value), None)
    return ParsedCall(value["name"], arguments if isinstance(arguments, dict) else None, text)


def _has_name(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str)
