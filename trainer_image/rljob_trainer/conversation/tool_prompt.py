"""Tools for chat templates that do not write them, such as SmolLM2's: in the system message, as plain text. Pure.

The wording is that of the templates of Qwen 2.5 and Llama 3, which the models of both formats have seen.
"""

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rljob_api.wire.base import Message
from rljob_trainer.conversation.tool_calls import CALL_END, CALL_START, ToolFormat

_HERMES = f"""# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
%s
</tools>

For each function call, return a json object with function name and arguments within {CALL_START}{CALL_END} XML tags:
{CALL_START}
{{"name": <function-name>, "arguments": <args-json-object>}}
{CALL_END}"""
_LLAMA3 = """You have access to the following functions. To call a function, please respond with JSON for a function \
call.
Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}. \
Do not use variables.

%s"""


def write_tools(messages: Sequence[Message], tools: Sequence[dict[str, Any]], tool_format: ToolFormat) -> list[Message]:
    """Return the messages without calls and without the role `tool`: both are text. `tools`: as OpenAI's API has them,
    at least one."""
    wording = _HERMES if tool_format == "hermes" else _LLAMA3
    section = wording.replace("%s", "\n".join(map(_to_json, tools)))
    plain = _write_results([_write_calls(message, tool_format) for message in messages])
    if plain and plain[0].get("role") == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{section}"}, *plain[1:]]
    return [{"role": "system", "content": section}, *plain]


def _write_calls(message: Message, tool_format: ToolFormat) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [_write_call(call["function"], tool_format) for call in calls]
    separator = "\n" if tool_format == "hermes" else "; "
    others = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**others, "content": "\n".join(filter(None, [message.get("content"), separator.join(written)]))}


def _write_call(function: dict[str, Any], tool_format: ToolFormat) -> str:
    name, arguments = function["name"], function.get("arguments")
    if tool_format == "llama3":
        return _to_json({"name": name, "parameters": arguments})
    return f"{CALL_START}\n{_to_json({'name': name, 'arguments': arguments})}\n{CALL_END}"


def _write_results(messages: list[Message]) -> list[Message]:
    """Join the results that follow one answer to a message of the user: many templates require that roles alternate."""
    written: list[Message] = []
    for is_result, group in groupby(messages, key=lambda message: message.get("role") == "tool"):
        if is_result:
            results = [f"<tool_response>\n{message['content']}\n</tool_response>" for message in group]
            written.append({"role": "user", "content": "\n".join(results)})
        else:
            written += group
    return written


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
