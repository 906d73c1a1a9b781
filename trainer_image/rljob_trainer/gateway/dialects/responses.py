"""POST /v1/responses: OpenAI's Responses API. Pure.

A conversation is a list of items. One answer is several: its reasoning, its text, and its calls. Their ids name the
answer, so that they are one message again however a client sorts them. Items without such ids, which some clients
write, are one message as long as they follow in this order.

The gateway keeps no conversations: requests with previous_response_id or conversation are refused, since the program's
own list is what the next request continues.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rljob_api.wire.base import Message
from rljob_trainer.gateway.dialects import fields
from rljob_trainer.gateway.dialects.tools import find_forms, read_tools
from rljob_trainer.gateway.types import ModelAnswer, ModelRequest

_SEND_ALL = "the gateway keeps no conversations; send the whole conversation as input"
_LOGPROBS = "message.output_text.logprobs"
_ITEM_ID = re.compile(r"(?:rs|msg|fc)_(.+)\.\d+")
"""Id of an item that this gateway wrote: the id of its answer is in the group."""
_CALL_ID = re.compile(r"call_(\d+)_\d+")
"""Id of a call of this gateway (Transcript.read_answer): the number of its answer is in the group."""
_CALL_FIELDS = {"arguments": "function_call_arguments", "input": "custom_tool_call_input"}
"""What the policy wrote in the item of a call, and the events that have it."""
_REASONING, _MESSAGE, _CALL = range(3)
"""The order of the items of an answer."""


class Responses(fields.OpenAIErrors):
    """The dialect of /v1/responses."""

    path = "/v1/responses"
    reads = frozenset(
        ("model", "input", "instructions", "max_output_tokens", "stop", "stream", "tools", "include", "top_logprobs")
    )

    def read(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> ModelRequest:
        num_top = fields.read_count(body.get("top_logprobs"), "top_logprobs", minimum=0)
        tools = body.get("tools") or ()
        return ModelRequest(
            model=fields.read_model(body),
            messages=_read_input(body.get("instructions"), body.get("input")),
            tools=read_tools(tools),
            forms=find_forms(tools),
            max_tokens=fields.read_count(body.get("max_output_tokens"), "max_output_tokens"),
            stop=fields.read_stop(body.get("stop"), "stop"),
            stream=fields.read_flag(body.get("stream"), "stream"),
            num_logprobs=num_top or 0 if _LOGPROBS in fields.read_list(body.get("include"), "include") else None,
        )

    def write(self, request: ModelRequest, answer: ModelAnswer) -> dict[str, Any]:
        is_cut = answer.finish_reason == "length"
        num_sampled = len(answer.completion.token_ids)
        return {
            **_write_start(request, answer),
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": _write_items(request, answer),
            "usage": {
                "input_tokens": answer.num_prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": num_sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": answer.num_prompt_tokens + num_sampled,
            },
        }

    def events(self, request: ModelRequest, answer: ModelAnswer) -> Sequence[bytes]:
        numbered = ({**event, "sequence_number": i} for i, event in enumerate(self._list_events(request, answer)))
        return [fields.write_event(event, event["type"]) for event in numbered]

    def _list_events(self, request: ModelRequest, answer: ModelAnswer) -> Iterator[dict[str, Any]]:
        start, whole = _write_start(request, answer), self.write(request, answer)
        yield {"type": "response.created", "response": start}
        yield {"type": "response.in_progress", "response": start}
        for index, item in enumerate(whole["output"]):
            empty: dict[str, Any] = {name: "" for name in _CALL_FIELDS if name in item}
            added = {**item, **(empty or {"content": []})}
            yield {
                "type": "response.output_item.added",
                "output_index": index,
                "item": {**added, "status": "in_progress"},
            }
            yield from _write_parts(item, {"item_id": item["id"], "output_index": index})
            yield {"type": "response.output_item.done", "output_index": index, "item": item}
        yield {"type": f"response.{whole['status']}", "response": whole}

    def error_event(self, status: int, code: str, message: str) -> bytes:
        # OpenAI's clients raise for the field `error`; others read the event's own fields.
        plain = {"type": "error", "code": code, "message": message, "param": None, "sequence_number": 0}
        return fields.write_event({**plain, **self.error(status, code, message)}, "error")


def _read_input(instructions: Any, given: Any) -> list[Message]:
    history = _History()
    if instructions:
        history.add_plain({"role": "system", "content": fields.read_text(instructions, "instructions")})
    if isinstance(given, str):
        history.add_plain({"role": "user", "content": given})
    else:
        for index, item in enumerate(fields.read_list(given, "input")):
            history.add(fields.read_object(item, f"input[{index}]"), f"input[{index}]")
    if not given:
        raise fields.refuse("input", "required: a text or a list of items", "missing_required_parameter")
    return fields.join_leading_system(history.messages)


@dataclass
class _Answer:
    """An answer, as far as its items were read."""

    message: Message
    names: dict[str, str]
    """What identifies it, by kind of name. Empty: nothing that the items have."""
    place: int
    """Position of its last item."""

    def continues_with(self, names: Mapping[str, str], place: int) -> bool:
        """Whether the next item belongs to this answer: it follows in its order, and does not name another one."""
        is_next = place > self.place or place == self.place == _CALL
        return is_next and all(self.names.get(kind, name) == name for kind, name in names.items())


class _History:
    """Collects items to messages."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._answers: dict[tuple[str, str], _Answer] = {}
        """By kind of name, and name."""
        self._last: _Answer | None = None
        """None: the last item belongs to no answer."""

    def add_plain(self, message: Message) -> None:
        self.messages.append(message)
        self._last = None

    def add(self, item: Mapping[str, Any], path: str) -> None:
        kind = item.get("type") or "message"
        if kind == "message":
            self._add_message(item, path)
        elif kind in ("function_call", "custom_tool_call"):
            name = fields.read_string(item.get("name"), f"{path}.name")
            field = "arguments" if kind == "function_call" else "input"
            arguments = fields.read_string(item.get(field), f"{path}.{field}")
            arguments = arguments if kind == "function_call" else json.dumps({field: arguments})
            call = fields.write_call(fields.read_string(item.get("call_id"), f"{path}.call_id"), name, arguments)
            self._find_answer(item, _CALL).setdefault("tool_calls", []).append(call)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            call_id = fields.read_string(item.get("call_id"), f"{path}.call_id")
            text = fields.read_text(item.get("output"), f"{path}.output")
            self.add_plain({"role": "tool", "tool_call_id": call_id, "content": text})
        elif kind == "reasoning":
            text = fields.read_text(_as_text_parts(item.get("content")), f"{path}.content")
            if text:
                self._find_answer(item, _REASONING)["reasoning_content"] = text
        elif kind == "item_reference":
            raise fields.refuse(f"{path}.type", f"item_reference is not supported: {_SEND_ALL}")
        else:
            raise fields.refuse(
                f"{path}.type",
                f"{kind} is not supported; give message, function_call, function_call_output or reasoning",
            )

    def _add_message(self, item: Mapping[str, Any], path: str) -> None:
        role = item.get("role")
        text = fields.read_text(item.get("content"), f"{path}.content")
        if role == "assistant":
            self._find_answer(item, _MESSAGE)["content"] = text
        elif role in ("user", "system", "developer"):
            self.add_plain({"role": "system" if role == "developer" else role, "content": text})
        else:
            raise fields.refuse(f"{path}.role", "must be user, assistant, system or developer")

    def _find_answer(self, item: Mapping[str, Any], place: int) -> Message:
        """Return the message of the answer to which the item belongs."""
        found = {"id": _ITEM_ID.fullmatch(str(item.get("id"))), "call_id": _CALL_ID.fullmatch(str(item.get("call_id")))}
        names = {kind: match[1] for kind, match in found.items() if match}
        answer = next((self._answers[name] for name in names.items() if name in self._answers), None)
        if answer is None and self._last is not None and self._last.continues_with(names, place):
            answer = self._last
        if answer is None:
            answer = _Answer({"role": "assistant", "content": None}, {}, place)
            self.messages.append(answer.message)
        answer.names.update(names)
        answer.place = place
        self._answers.update(dict.fromkeys(names.items(), answer))
        self._last = answer
        return answer.message


def _as_text_parts(content: Any) -> Any:
    """Return the parts of a reasoning item as parts of text."""
    if not isinstance(content, list):
        return content
    return [{**part, "type": "text"} if isinstance(part, dict) else part for part in content]


def _write_start(request: ModelRequest, answer: ModelAnswer) -> dict[str, Any]:
    """Return the response before it has an output."""
    return {
        "id": answer.id,
        "object": "response",
        "created_at": answer.created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": request.max_tokens,
        "metadata": {},
        "model": request.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [{"type": "function", "strict": False, **tool.model_dump()} for tool in request.tools],
        "top_p": None,
        "truncation": "disabled",
        "usage": None,
    }


def _write_items(request: ModelRequest, answer: ModelAnswer) -> list[dict[str, Any]]:
    """Return the output. An empty answer is a message with an empty text."""
    message = answer.message
    status = "incomplete" if answer.finish_reason == "length" else "completed"
    items: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        content: list[dict[str, Any]] = [{"type": "reasoning_text", "text": message["reasoning_content"]}]
        items.append({"type": "reasoning", "id": f"rs_{answer.id}", "summary": [], "content": content})
    calls = message.get("tool_calls") or []
    if message.get("content") or not calls:
        content = [_write_text(request, answer)]
        items.append({"type": "message", "id": f"msg_{answer.id}", "role": "assistant", "content": content})
    for call in calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        form = request.forms.get(name, {})
        item = {"id": f"fc_{answer.id}", "call_id": call["id"], "name": name}
        if form.get("type") == "custom":
            items.append({**item, "type": "custom_tool_call", "input": str(json.loads(arguments).get("input", ""))})
        else:
            items.append({**item, **form, "type": "function_call", "arguments": arguments})
    return [{**item, "id": f"{item['id']}.{index}", "status": status} for index, item in enumerate(items)]


def _write_text(request: ModelRequest, answer: ModelAnswer) -> dict[str, Any]:
    part: dict[str, Any] = {"type": "output_text", "text": answer.message.get("content") or "", "annotations": []}
    return part if request.num_logprobs is None else {**part, "logprobs": fields.write_logprobs(request, answer)}


def _write_parts(item: Mapping[str, Any], place: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Write the events between the start and the end of an item. `place`: the fields that name the item."""
    for name, event in _CALL_FIELDS.items():
        if name in item:
            yield {"type": f"response.{event}.delta", **place, "delta": item[name]}
            yield {"type": f"response.{event}.done", **place, "name": item["name"], name: item[name]}
            return
    for index, part in enumerate(item["content"]):
        where = {**place, "content_index": index}
        logprobs = {"logprobs": part.get("logprobs", [])} if part["type"] == "output_text" else {}
        yield {"type": "response.content_part.added", **where, "part": {**part, "text": ""}}
        yield {"type": f"response.{part['type']}.delta", **where, "delta": part["text"], **logprobs}
        yield {"type": f"response.{part['type']}.done", **where, "text": part["text"], **logprobs}
        yield {"type": "response.content_part.done", **where, "part": part}
