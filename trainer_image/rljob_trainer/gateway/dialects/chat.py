"""POST /v1/chat/completions: OpenAI's chat completions. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rljob_api.wire.base import Message
from rljob_trainer.gateway.dialects import fields
from rljob_trainer.gateway.dialects.tools import read_tools
from rljob_trainer.gateway.types import ModelAnswer, ModelRequest

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Roles of requests -> roles that chat templates know."""
_REASONING = ("reasoning_content", "reasoning")
"""Names of reasoning, which clients send back."""


class ChatCompletions(fields.OpenAIErrors):
    path = "/v1/chat/completions"
    reads = frozenset(
        {
            *("model", "messages", "tools", "max_tokens", "max_completion_tokens", "stop"),
            *("stream", "stream_options", "logprobs", "top_logprobs"),
        }
    )

    def read(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> ModelRequest:
        stream = fields.read_flag(body.get("stream"), "stream")
        return ModelRequest(
            model=fields.read_model(body),
            messages=_read_messages(body.get("messages")),
            tools=read_tools(body.get("tools") or ()),
            max_tokens=_read_limit(body),
            stop=fields.read_stop(body.get("stop"), "stop"),
            stream=stream,
            with_usage=fields.asks_for_usage(body) or not stream,
            num_logprobs=_read_logprobs(body),
        )

    def write(self, request: ModelRequest, answer: ModelAnswer) -> dict[str, Any]:
        choice = {
            "index": 0,
            "message": {**answer.message, **_write_reasoning(answer), "refusal": None},
            "logprobs": _write_logprobs(request, answer),
            "finish_reason": answer.finish_reason,
        }
        return {
            **_write_head(request, answer, "chat.completion"),
            "choices": [choice],
            "usage": fields.write_usage(answer),
        }

    def events(self, request: ModelRequest, answer: ModelAnswer) -> Sequence[bytes]:
        head = _write_head(request, answer, "chat.completion.chunk")
        usage = {"usage": None} if request.with_usage else {}
        chunks = [{**head, "choices": [choice], **usage} for choice in _split(request, answer)]
        if request.with_usage:
            chunks.append({**head, "choices": [], "usage": fields.write_usage(answer)})
        return [*map(fields.write_event, chunks), fields.DONE]


def _read_messages(value: Any) -> list[Message]:
    messages = fields.read_list(value, "messages")
    if not messages:
        raise fields.refuse("messages", "required: at least one message", "missing_required_parameter")
    return fields.join_leading_system([_read_message(each, f"messages[{i}]") for i, each in enumerate(messages)])


def _read_message(value: Any, path: str) -> Message:
    """Return the message with its content as text, and without the fields that are not a part of the conversation."""
    given = fields.read_object(value, path)
    role = _ROLES.get(str(given.get("role")))
    if role is None:
        raise fields.refuse(f"{path}.role", f"must be one of {', '.join(_ROLES)}, got {given.get('role')!r}")
    parts = given.get("content")
    if role == "assistant" and isinstance(parts, list):  # LiteLLM writes Anthropic's thinking as parts
        thinking = [part for part in parts if isinstance(part, dict) and str(part.get("type")).endswith("thinking")]
        given = {"reasoning": "".join(str(part.get("thinking") or "") for part in thinking), **given}
        parts = [part for part in parts if part not in thinking]
    message: Message = {"role": role, "content": fields.read_text(parts, f"{path}.content")}
    if role == "assistant":
        if reasoning := next((text for name in _REASONING if (text := given.get(name))), None):
            message["reasoning_content"] = fields.read_string(reasoning, f"{path}.reasoning_content")
        calls = fields.read_list(given.get("tool_calls"), f"{path}.tool_calls")
        if calls:
            message["tool_calls"] = [_read_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(calls)]
    for name in ("name", "tool_call_id"):
        if given.get(name) is not None:
            message[name] = fields.read_string(given[name], f"{path}.{name}")
    return message


def _read_call(value: Any, path: str) -> dict[str, Any]:
    call = fields.read_object(value, path)
    function = fields.read_object(call.get("function"), f"{path}.function")
    arguments = function.get("arguments", "{}")
    if not isinstance(arguments, dict):
        arguments = fields.read_string(arguments, f"{path}.function.arguments")
    name = fields.read_string(function.get("name"), f"{path}.function.name")
    return fields.write_call(str(call.get("id") or ""), name, arguments)


def _read_limit(body: Mapping[str, Any]) -> int | None:
    limits = [fields.read_count(body.get(name), name) for name in ("max_tokens", "max_completion_tokens")]
    return min((limit for limit in limits if limit is not None), default=None)


def _read_logprobs(body: Mapping[str, Any]) -> int | None:
    num_top = fields.read_count(body.get("top_logprobs"), "top_logprobs", minimum=0)
    return num_top or 0 if fields.read_flag(body.get("logprobs"), "logprobs") else None


def _write_head(request: ModelRequest, answer: ModelAnswer, kind: str) -> dict[str, Any]:
    return {"id": answer.id, "object": kind, "created": answer.created, "model": request.model}


def _write_logprobs(request: ModelRequest, answer: ModelAnswer) -> dict[str, Any] | None:
    if request.num_logprobs is None:
        return None
    return {"content": fields.write_logprobs(request, answer), "refusal": None}


def _split(request: ModelRequest, answer: ModelAnswer) -> Iterator[dict[str, Any]]:
    """Yield the choices of the stream: role, reasoning, content, each call, and the reason of the end."""
    message, logprobs = answer.message, _write_logprobs(request, answer)
    yield _write_delta({"role": "assistant", "content": "", "refusal": None})
    if reasoning := _write_reasoning(answer):
        yield _write_delta(reasoning)
    if message.get("content") or logprobs:
        yield {**_write_delta({"content": message.get("content") or ""}), "logprobs": logprobs}
    for index, call in enumerate(message.get("tool_calls") or []):
        yield _write_delta({"tool_calls": [{"index": index, **call}]})
    yield {**_write_delta({}), "finish_reason": answer.finish_reason}


def _write_reasoning(answer: ModelAnswer) -> dict[str, Any]:
    """Return it under both names: vLLM renamed it, and each client reads one name."""
    text = answer.message.get("reasoning_content")
    return dict.fromkeys(_REASONING, text) if text else {}


def _write_delta(delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
