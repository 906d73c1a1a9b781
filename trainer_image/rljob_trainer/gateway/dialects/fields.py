"""How the dialects read the fields of a request, and write events and errors. Pure.

Each error names the field by its path, such as messages[2].content[0].type. Leaves to meaning.py which fields are
obeyed, and to tools.py the tools.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rljob_api.wire.base import Message
from rljob_api.wire.calls import ToolSchema
from rljob_trainer.gateway.types import ModelAnswer, ModelRequest, RequestError

_TEXT_PARTS = ("text", "input_text", "output_text")


def refuse(path: str, problem: str, code: str = "invalid_value") -> RequestError:
    """Return the error for one field. `problem`: what is wrong and what to do."""
    return RequestError(400, code, f"{path}: {problem}")


def read_model(body: Mapping[str, Any]) -> str:
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise refuse("model", "required: the name of a model, such as policy", "missing_required_parameter")
    return model


def read_list(value: Any, path: str) -> list[Any]:
    """Return a list. None is an empty one."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise refuse(path, f"not a list: {_show(value)}")
    return value


def read_object(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refuse(path, f"not an object: {_show(value)}")
    return value


def read_string(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise refuse(path, f"not a string: {_show(value)}")
    return value


def read_flag(value: Any, path: str) -> bool:
    """Return a boolean. None is false."""
    if value not in (None, True, False):
        raise refuse(path, f"not true or false: {_show(value)}")
    return bool(value)


def asks_for_usage(body: Mapping[str, Any]) -> bool:
    options = read_object(body.get("stream_options") or {}, "stream_options")
    return read_flag(options.get("include_usage"), "stream_options.include_usage")


def read_count(value: Any, path: str, minimum: int = 1) -> int | None:
    """Return a whole number; None if it is not given."""
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise refuse(path, f"must be a whole number of at least {minimum}, got {_show(value)}")
    return value


def read_stop(value: Any, path: str) -> list[str]:
    """Return the strings that end an answer: given as none, one, or a list."""
    texts = [value] if isinstance(value, str) else read_list(value, path)
    return [text for index, item in enumerate(texts) if (text := read_string(item, f"{path}[{index}]"))]


def read_text(content: Any, path: str) -> str:
    """Return the text of a message: null, a string, or a list of text parts, which a newline joins as in vLLM. Raise
    RequestError for images and other parts: the policy reads text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = read_list(content, path)
    return "\n".join(read_part(part, f"{path}[{index}]") for index, part in enumerate(parts))


def read_part(part: Any, path: str) -> str:
    """Return the text of one part of a message."""
    if isinstance(part, str):
        return part
    kind = read_object(part, path).get("type")
    if kind in _TEXT_PARTS:
        return read_string(part.get("text"), f"{path}.text")
    if kind == "refusal":
        return read_string(part.get("refusal"), f"{path}.refusal")
    raise refuse(f"{path}.type", f"{_show(kind)} is not supported: the policy reads text alone", "unsupported_value")


def read_tool(name: Any, description: Any, parameters: Any, path: str) -> ToolSchema:
    """Return a function that the policy may call. `parameters`: JSON schema; None: it has no arguments."""
    schema = {"type": "object", "properties": {}} if parameters is None else read_object(parameters, path)
    try:
        return ToolSchema(name=name, description=description or "", parameters=schema)
    except ValueError as error:
        problem = error.errors()[0] if hasattr(error, "errors") else {"loc": (), "msg": str(error)}
        raise refuse(".".join([path, *map(str, problem["loc"])]), str(problem["msg"])) from None


def write_call(call_id: str, name: str, arguments: str | dict[str, Any]) -> dict[str, Any]:
    """Return a tool call as messages have it. `arguments`: JSON text, or the object."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def join_leading_system(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with one system message at the start, as many chat templates require: the leading ones,
    joined by an empty line."""
    count = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if count < 2:
        return list(messages)
    text = "\n\n".join(message["content"] for message in messages[:count])
    return [{"role": "system", "content": text}, *messages[count:]]


def write_event(data: Mapping[str, Any], event: str = "") -> bytes:
    """Return one server-sent event."""
    name = f"event: {event}\n" if event else ""
    return f"{name}data: {json.dumps(data)}\n\n".encode()


def write_usage(answer: ModelAnswer) -> dict[str, Any]:
    """Return the token counts as chat completions and completions write them."""
    num_sampled = len(answer.completion.token_ids)
    return {
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": num_sampled,
        "total_tokens": answer.num_prompt_tokens + num_sampled,
    }


DONE = b"data: [DONE]\n\n"
"""Ends a stream of chat completions and of completions."""


def write_logprobs(request: ModelRequest, answer: ModelAnswer) -> list[dict[str, Any]]:
    """Return the log-probs of all sampled tokens, also of those that are not in the text. Of the likeliest tokens, only
    the sampled one is known."""
    entries = []
    for token, logprob in zip(answer.token_texts, answer.completion.logprobs, strict=True):
        entry = {"token": token, "logprob": logprob, "bytes": list(token.encode(errors="replace"))}
        entries.append({**entry, "top_logprobs": [entry] if request.num_logprobs else []})
    return entries


class OpenAIErrors:
    """Errors as OpenAI's APIs write them."""

    keep_alive = b": keep-alive\n\n"
    """A comment in a stream: clients skip it."""

    def error(self, status: int, code: str, message: str) -> dict[str, Any]:
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
        return {"error": {"message": message, "type": kind, "param": None, "code": code}}

    def error_event(self, status: int, code: str, message: str) -> bytes:
        return write_event(self.error(status, code, message))


def _show(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."
