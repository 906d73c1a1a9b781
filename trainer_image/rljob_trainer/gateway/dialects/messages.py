"""POST /v1/messages: Anthropic's Messages API. Pure.

    tool_use       a call of the assistant's message
    tool_result    a message of the role tool; one with is_error begins with "Error: "
    thinking       the reasoning of the assistant's message; answers show it if the request enables thinking

Other blocks are text.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rljob_api.wire.base import Message
from rljob_trainer.gateway.dialects import fields
from rljob_trainer.gateway.dialects.tools import read_tools
from rljob_trainer.gateway.types import ModelAnswer, ModelRequest

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class Messages:
    """The dialect of /v1/messages."""

    path = "/v1/messages"
    reads = frozenset({"model", "messages", "system", "max_tokens", "stop_sequences", "stream", "tools", "thinking"})
    keep_alive = fields.write_event({"type": "ping"}, "ping")

    def read(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> ModelRequest:
        thinking = fields.read_object(body.get("thinking") or {}, "thinking")
        return ModelRequest(
            model=fields.read_model(body),
            messages=_read_messages(body.get("system"), body.get("messages")),
            tools=read_tools(body.get("tools") or ()),
            max_tokens=fields.read_count(body.get("max_tokens"), "max_tokens"),
            stop=fields.read_stop(body.get("stop_sequences"), "stop_sequences"),
            stream=fields.read_flag(body.get("stream"), "stream"),
            with_reasoning=thinking.get("type") in ("enabled", "adaptive"),
        )

    def write(self, request: ModelRequest, answer: ModelAnswer) -> dict[str, Any]:
        stop = answer.stop if answer.stop and answer.finish_reason == "stop" else None
        return {
            "id": answer.id,
            "type": "message",
            "role": "assistant",
            "model": request.model,
            "content": _write_blocks(request, answer),
            "stop_reason": "stop_sequence" if stop else _STOP_REASONS[answer.finish_reason],
            "stop_sequence": stop,
            "usage": {"input_tokens": answer.num_prompt_tokens, "output_tokens": len(answer.completion.token_ids)},
        }

    def events(self, request: ModelRequest, answer: ModelAnswer) -> Sequence[bytes]:
        whole = self.write(request, answer)
        started = {
            **whole,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": answer.num_prompt_tokens, "output_tokens": 0},
        }
        delta = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        events: list[dict[str, Any]] = [{"type": "message_start", "message": started}]
        for index, block in enumerate(whole["content"]):
            start, deltas = _split_block(block)
            events.append({"type": "content_block_start", "index": index, "content_block": start})
            events += [{"type": "content_block_delta", "index": index, "delta": part} for part in deltas]
            events.append({"type": "content_block_stop", "index": index})
        events.append({"type": "message_delta", "delta": delta, "usage": whole["usage"]})
        events.append({"type": "message_stop"})
        return [fields.write_event(event, event["type"]) for event in events]

    def error(self, status: int, code: str, message: str) -> dict[str, Any]:
        kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message, "code": code}}

    def error_event(self, status: int, code: str, message: str) -> bytes:
        return fields.write_event(self.error(status, code, message), "error")


def _read_messages(system: Any, given: Any) -> list[Message]:
    messages: list[Message] = []
    text = fields.read_text(system, "system")
    if text:
        messages.append({"role": "system", "content": text})
    for index, value in enumerate(fields.read_list(given, "messages")):
        path = f"messages[{index}]"
        message = fields.read_object(value, path)
        messages += _read_message(message.get("role"), message.get("content"), path)
    if not messages or messages[-1]["role"] == "assistant":
        raise fields.refuse("messages", "must end with a message of the user: the policy's answers cannot be prefilled")
    return fields.join_leading_system(_join_answers(messages))


def _read_message(role: Any, content: Any, path: str) -> list[Message]:
    if role == "user":
        return _read_user(content, f"{path}.content")
    if role == "assistant":
        return [_read_assistant(content, f"{path}.content")]
    if role == "system":
        return [{"role": "system", "content": fields.read_text(content, f"{path}.content")}]
    raise fields.refuse(f"{path}.role", "must be user, assistant or system")


def _read_user(content: Any, path: str) -> list[Message]:
    """Return the results of tools, and then the user's text."""
    if not isinstance(content, list):
        return [{"role": "user", "content": fields.read_text(content, path)}]
    results: list[Message] = []
    texts: list[str] = []
    for index, value in enumerate(content):
        block = fields.read_object(value, f"{path}[{index}]")
        if block.get("type") == "tool_result":
            call_id = fields.read_string(block.get("tool_use_id"), f"{path}[{index}].tool_use_id")
            text = fields.read_text(block.get("content"), f"{path}[{index}].content")
            error = "Error: " if block.get("is_error") else ""
            results.append({"role": "tool", "tool_call_id": call_id, "content": f"{error}{text}"})
        else:
            texts.append(fields.read_part(block, f"{path}[{index}]"))
    return [*results, {"role": "user", "content": "\n".join(texts)}] if texts or not results else results


def _read_assistant(content: Any, path: str) -> Message:
    """Return the message of an answer. Its reasoning, if any, is its first thinking block."""
    message: Message = {"role": "assistant", "content": None}
    if not isinstance(content, list):
        return {**message, "content": fields.read_text(content, path)}
    texts: list[str] = []
    for index, value in enumerate(content):
        where = f"{path}[{index}]"
        block = fields.read_object(value, where)
        kind = block.get("type")
        if kind == "tool_use":
            message.setdefault("tool_calls", []).append(_read_call(block, where))
        elif kind == "thinking":
            message.setdefault("reasoning_content", fields.read_string(block.get("thinking"), f"{where}.thinking"))
        elif kind != "redacted_thinking":
            texts.append(fields.read_part(block, where))
    message["content"] = "\n".join(texts) if texts else None
    return message


def _read_call(block: Mapping[str, Any], path: str) -> dict[str, Any]:
    arguments = json.dumps(fields.read_object(block.get("input"), f"{path}.input"))
    call_id = fields.read_string(block.get("id"), f"{path}.id")
    return fields.write_call(call_id, fields.read_string(block.get("name"), f"{path}.name"), arguments)


def _join_answers(messages: Sequence[Message]) -> list[Message]:
    """Join assistant messages in a row, which are one turn in this API: programs split text and calls."""
    joined: list[Message] = []
    for message in messages:
        last = joined[-1] if joined else {}
        if message["role"] != "assistant" or last.get("role") != "assistant":
            joined.append(message)
            continue
        calls = [*last.get("tool_calls", []), *message.get("tool_calls", [])]
        texts = [text for text in (last["content"], message["content"]) if text]
        joined[-1] = {
            **message,
            **last,
            "content": "\n".join(texts) or None,
            **({"tool_calls": calls} if calls else {}),
        }
    return joined


def _write_blocks(request: ModelRequest, answer: ModelAnswer) -> list[dict[str, Any]]:
    """Return the content. An empty answer is an empty text, so that there is a block."""
    message = answer.message
    blocks: list[dict[str, Any]] = []
    reasoning = message.get("reasoning_content")
    if reasoning and request.with_reasoning:
        # Programs drop a block without a signature.
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": answer.id})
    calls = message.get("tool_calls") or []
    if message.get("content") or not calls:
        blocks.append({"type": "text", "text": message.get("content") or ""})
    for call in calls:
        function = call["function"]
        given = json.loads(function["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": given})
    return blocks


def _split_block(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the block as it starts, and its deltas."""
    if block["type"] == "thinking":
        thinking = {"type": "thinking_delta", "thinking": block["thinking"]}
        signature = {"type": "signature_delta", "signature": block["signature"]}
        return {**block, "thinking": "", "signature": ""}, [thinking, signature]
    if block["type"] == "tool_use":
        return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
    return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}] if block["text"] else []
