"""Whether the messages that a client sends back are those that were recorded. Pure.

Clients change what they echo: content None, an empty text, or a list of parts; arguments as text or as an object; other
ids; reasoning kept or dropped; results of tools in any order; further keys. The digest of a history is the same for all
these forms. It differs for everything that changes what is said: other text in an answer, another call, another result.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, takewhile
from typing import Any

from rljob_api.wire.base import Message
from rljob_trainer.conversation.reasoning import drop_reasoning
from rljob_trainer.conversation.template import TemplateError

_ROLES = {"developer": "system"}
"""Names for roles that chat templates do not know."""
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_DIGEST_BYTES = 16
START = b""
"""Digest of an empty history."""


def normalize(messages: Sequence[Message]) -> list[Message]:
    """Return the messages as chat templates take them: content is text, arguments are objects, keys without a value are
    left out, and results of tools are in the order of the calls. Raise TemplateError for content that is not text."""
    return _order_results([_normalize(message) for message in messages])


def digest_prefixes(messages: Sequence[Message], *, has_reasoning: bool) -> Iterator[bytes]:
    """Yield the digest of each history that `messages`, which are normalized, begin with: one for each message.
    `has_reasoning`: whether <think>...</think> at the start of an answer is reasoning."""
    digest, positions = START, find_positions({})
    for message in messages:
        digest = extend(digest, message, positions.get(message.get("tool_call_id")), has_reasoning=has_reasoning)
        yield digest
        if message.get("role") != "tool":
            positions = find_positions(message)


def extend(digest: bytes, message: Message, position: int | None = None, *, has_reasoning: bool) -> bytes:
    """Return the digest of a history with one more message. `position`: of the call whose result it is."""
    new = hashlib.blake2b(digest, digest_size=_DIGEST_BYTES)
    for part in (message["role"], *_read_parts(message, position, has_reasoning=has_reasoning)):
        written = part.encode(errors="surrogatepass")
        new.update(len(written).to_bytes(8))
        new.update(written)
    return new.digest()


def find_positions(message: Message) -> dict[str | None, int]:
    """Return the positions of the calls of an answer by their ids."""
    calls = message.get("tool_calls") or []
    return {call["id"]: position for position, call in enumerate(calls) if call.get("id")}


def relabel(messages: Sequence[Message], echoed: Message, recorded: Message) -> list[Message]:
    """Return the messages after an answer. Results have the ids of the recorded calls instead of those that the client
    sent back; ids without a call stay as they are."""
    new_ids = {
        old["id"]: new["id"]
        for old, new in zip(echoed.get("tool_calls") or [], recorded.get("tool_calls") or [], strict=True)
        if "id" in old
    }
    count = sum(1 for _ in takewhile(_is_result, messages))
    results = [
        {**message, "tool_call_id": new_ids[message["tool_call_id"]]}
        if message.get("tool_call_id") in new_ids
        else message
        for message in messages[:count]
    ]
    return [*results, *messages[count:]]


def count_equal(echoed: Sequence[Message], recorded: Sequence[Message]) -> int:
    """Return how many details of the answers, which digests ignore, a client has kept: it tells apart answers that say
    the same."""
    return sum(map(_count_equal, echoed, recorded))


def _count_equal(echoed: Message, recorded: Message) -> int:
    if echoed.get("role") != "assistant":
        return 0
    whole = recorded.get("content") or ""
    same_ids = find_positions(echoed) == find_positions(recorded)
    return same_ids + (echoed["content"] in whole) + (echoed.get("reasoning_content", "").strip() in whole)


def _is_result(message: Message) -> bool:
    return message.get("role") == "tool"


def _normalize(message: Message) -> Message:
    role = message.get("role")
    if not isinstance(role, str):
        raise TemplateError("each message must have a role")
    known: Message = {"role": _ROLES.get(role, role), "content": _read_text(message.get("content"), role)}
    if isinstance(reasoning := message.get("reasoning_content") or message.get("reasoning"), str):
        known["reasoning_content"] = reasoning
    if calls := message.get("tool_calls"):
        known["tool_calls"] = [_normalize_call(call) for call in calls]
    return known | {key: message[key] for key in ("name", "tool_call_id") if isinstance(message.get(key), str)}


def _read_text(content: Any, role: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not isinstance(content, list):
        raise TemplateError(f"the content of a message with the role {role} must be text or a list of parts")
    parts = [part for part in content if isinstance(part, Mapping) and part.get("type", "text") in _TEXT_PARTS]
    if len(parts) < len(content) and role != "assistant":  # of an answer, it is what the policy did not say
        raise TemplateError(f"a message with the role {role} has a part that is not text; the policy reads text alone")
    return "\n".join(str(part.get("text") or "") for part in parts)


def _normalize_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise TemplateError("each entry of tool_calls must have a function with a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _parse(arguments)
    known = {"type": "function", "function": {"name": function["name"], "arguments": arguments or {}}}
    return {"id": call["id"], **known} if isinstance(call.get("id"), str) else known


def _parse(arguments: str) -> Any:
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments


def _order_results(messages: list[Message]) -> list[Message]:
    """Sort the results that follow an answer like its calls: templates write them without ids. Results with unknown ids
    stay where they are, and so do the others next to them. A result gets the name of its function."""
    ordered: list[Message] = []
    for is_result, group in groupby(messages, key=_is_result):
        results = list(group)
        positions = find_positions(ordered[-1]) if is_result and ordered else {}
        if positions and all(message.get("tool_call_id") in positions for message in results):
            calls = ordered[-1]["tool_calls"]
            results.sort(key=lambda message: positions[message["tool_call_id"]])
            results = [
                {"name": calls[positions[message["tool_call_id"]]]["function"]["name"], **message}
                for message in results
            ]
        ordered += results
    return ordered


def _read_parts(message: Message, position: int | None, *, has_reasoning: bool) -> list[str]:
    """Return what a client keeps when it sends the message back."""
    role, content = message.get("role"), message.get("content") or ""
    if role == "tool":
        return [content, str(position)]
    if role != "assistant":
        return [content]
    text = drop_reasoning(content) if has_reasoning else content
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return [text.strip(), *(part for call in calls for part in (call["name"], _write_arguments(call["arguments"])))]


def _write_arguments(arguments: Any) -> str:
    """Return one text for all ways to write the same arguments: JavaScript writes 1.0 as 1."""
    try:
        text = json.dumps(arguments, sort_keys=True)
        return json.dumps(json.loads(text, parse_float=_read_number)) if ".0" in text else text
    except (ValueError, RecursionError) as error:
        raise TemplateError("the arguments of a call are not JSON, or nested too deeply") from error


def _read_number(text: str) -> float | int:
    number = float(text)
    return int(number) if number.is_integer() else number
