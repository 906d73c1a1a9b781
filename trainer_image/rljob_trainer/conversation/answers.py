"""The text of a completion as a message of OpenAI's chat completions, and as the chat template gets it back. Pure.

    <think>\\nTwo and two.\\n</think>\\n\\nSo: <tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>
    reasoning_content                     content  tool_calls
    content                                       tool_calls                       (for the template)

The template gets the reasoning within the content, as the policy wrote it: so its own rule for earlier reasoning
applies, whatever the client sends back. The order is that of vLLM: first reasoning, then the calls in the rest.
"""

import json
from typing import Any

from rljob_api.wire.base import Message
from rljob_trainer.conversation.reasoning import find_opening, split_reasoning, strip_marks
from rljob_trainer.conversation.tool_calls import Answer, ParsedCall, ToolFormat, is_json, parse


def parse_answer(
    text: str, *, tool_format: ToolFormat | None, prompt_text: str, has_reasoning: bool, call_prefix: str
) -> Message:
    """Return role, content (None if there are calls alone), and if any reasoning_content and tool_calls.

    `text`: without special tokens. `tool_format`: None without tools, or if the answer was cut off, because half a call
    is none. `prompt_text`: its end may open <think>. `has_reasoning`: see ChatTemplate. `call_prefix`: of calls' ids.
    An answer with a call that cannot be read is content, as the policy wrote it.
    """
    reasoning, rest = _split(text, find_opening(prompt_text), has_reasoning=has_reasoning)
    answer = parse(rest, tool_format) if tool_format is not None else Answer(rest)
    message: Message = {"role": "assistant", "content": rest}
    if answer.calls and all(map(_is_readable, answer.calls)):
        message["content"] = answer.content.rstrip("\n") or None  # templates write the line break before calls
        message["tool_calls"] = [_write_call(call, f"{call_prefix}_{i}") for i, call in enumerate(answer.calls)]
    if reasoning:
        message["reasoning_content"] = strip_marks(reasoning)
    return message


def restore(message: Message, text: str, *, prompt_text: str, has_reasoning: bool) -> Message:
    """Return an answer as the template gets it. `message`: what parse_answer returned for `text`."""
    opening = find_opening(prompt_text)
    if not message.get("tool_calls"):
        return {"role": "assistant", "content": opening + text}
    reasoning, _ = _split(text, opening, has_reasoning=has_reasoning)
    calls = [
        {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {"role": "assistant", "content": reasoning + (message.get("content") or ""), "tool_calls": calls}


def separate_reasoning(message: Message, opening: str = "") -> Message:
    """Return an answer with its reasoning apart from the content, as OpenAI's API has it. `opening`: the <think> with
    which its prompt ends."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    reasoning, rest = split_reasoning(content if content.startswith(opening) else opening + content)
    return {**message, "content": rest, "reasoning_content": strip_marks(reasoning)} if reasoning else message


def _split(text: str, opening: str, *, has_reasoning: bool) -> tuple[str, str]:
    return split_reasoning(opening + text) if opening or has_reasoning else ("", text)


def _is_readable(call: ParsedCall) -> bool:
    return bool(call.name) and _is_text(call.name) and call.arguments is not None and is_json(call.arguments)


def _write_call(call: ParsedCall, call_id: str) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    if not _is_text(arguments):
        arguments = json.dumps(call.arguments)
    return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _is_text(text: str) -> bool:
    """Whether a response can have it: JSON can have half a surrogate pair, and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
