"""A simulated user: `respond` as a function or a method, called by parameter names; and the reading of its reply.

Calls share nothing: `state` comes with the request, the function changes or replaces it, and the reply returns it.
Invariant: a reply is the fields of a UserReply as JSON, of a bounded size, or a reason.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from rljob_api.functions import user_forms
from rljob_api.functions.descriptions import Function
from rljob_api.wire.contract import MAX_USER_REPLY_BYTES
from rljob_reward.worker.adapters.binding import CallBinding
from rljob_reward.worker.adapters.json_values import NotJsonError, to_json, to_log
from rljob_reward.worker.adapters.outcome import (
    BAD_RETURN,
    EXCEPTION,
    NOT_FINITE,
    CallOutcome,
    describe,
    failed_call,
    read_number,
)
from rljob_reward.worker.adapters.results import fields_of

_KEYS: Final = ("text", "reward", "info", "state")
_EXPECTED: Final = (
    '(text or None, reward or None, info), the same with the state as fourth element, a dict with "text", a str, or '
    "None, which ends the conversation"
)
_ROW_OVERRIDES: Final = ("ground_truth", "answer", "data_source")
"""Values that a column with the parameter's name replaces."""


def bind(function: Callable[..., Any], parameters: Function, kwargs: Mapping[str, Any]) -> CallBinding:
    """Bind `respond`. `kwargs` are passed to each call."""

    def call(request: dict[str, Any]) -> Any:
        arguments = request["arguments"]
        arguments.setdefault("state", {})
        columns = columns_of(arguments)
        values = {**read_values(arguments), **{k: v for k, v in columns.items() if k in _ROW_OVERRIDES}}
        given = {**columns, **values, **kwargs}
        missing = [name for name in parameters.required if name not in given]
        if missing:
            found = ", ".join(columns) or "none"
            return failed_call(
                EXCEPTION,
                f"{parameters.show()} requires {', '.join(missing)}, which the row does not have (its other columns: "
                f"{found}); it may take {', '.join(user_forms.VALUES)}",
            )
        return function(**{name: value for name, value in given.items() if parameters.accepts(name)})

    return CallBinding(call, lambda value, request: read(value, request["arguments"]["state"]))


def columns_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    columns: dict[str, Any] = arguments.get("extra_info", {})
    return columns


def read_values(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return what user_forms.VALUES names, from the fields of a UserCall."""
    truth = arguments.get("ground_truth")
    return {
        "messages": arguments["messages"],
        "state": arguments.get("state", {}),
        "turn": arguments.get("turn", 0),
        "episode": arguments.get("episode", ""),
        "prompt": arguments["prompt"],
        "ground_truth": truth,
        "answer": truth,
        "data_source": arguments.get("data_source", ""),
        "extra_info": columns_of(arguments),
    }


def read(value: Any, state: Any) -> CallOutcome:
    """Read what `respond` returned. `state` is the dict that it got, which it may have changed."""
    if isinstance(value, CallOutcome):
        return value
    fields = _find_fields(value, state)
    if fields is None:
        return failed_call(BAD_RETURN, f"respond returned {describe(value)}; expected {_EXPECTED}")
    unknown = [str(key) for key in fields if key not in _KEYS]
    if unknown or "text" not in fields:
        what = f"with the unknown key {unknown[0]}" if unknown else 'without "text"'
        return failed_call(BAD_RETURN, f"respond returned a dict {what}; its keys may be {', '.join(_KEYS)}")
    return read_reply(fields["text"], fields.get("reward"), fields.get("info"), fields.get("state"), "respond")


def _find_fields(value: Any, state: Any) -> dict[Any, Any] | None:
    """Return the parts of a reply by name; None for another form."""
    if value is None or isinstance(value, str):
        return {"text": value, "state": state}
    fields = fields_of(value)
    if fields is not None:
        given = dict(fields)
        return given if given.get("state") is not None else {**given, "state": state}
    if not isinstance(value, (tuple, list)) or not 2 <= len(value) <= len(_KEYS):
        return None
    given = dict(zip(_KEYS, value, strict=False))
    return given if given.get("state") is not None else {**given, "state": state}


def read_reply(text: Any, reward: Any, info: Any, state: Any, name: str) -> CallOutcome:
    """Return a UserReply of these parts; a reason if one of them has another type than it must."""
    if text is not None and not isinstance(text, str):
        return failed_call(BAD_RETURN, f"{name}: text is {describe(text)}; expected a str, or None to end")
    number = None if reward is None else read_number(reward)
    if reward is not None and number is None:
        return failed_call(BAD_RETURN, f"{name}: reward is {describe(reward)}; expected a number or None")
    if number is not None and not math.isfinite(number):
        return failed_call(NOT_FINITE, f"{name}: reward is {number}")
    if info is not None and not isinstance(info, Mapping):
        return failed_call(BAD_RETURN, f"{name}: info is {describe(info)}; expected a dict")
    if not isinstance(state, Mapping):
        return failed_call(BAD_RETURN, f"{name}: state is {describe(state)}; expected a dict")
    try:
        kept = to_json(state, "state")
        reply = {"text": to_json(text, "text"), "reward": number, "state": kept, "info": to_log(info or {})}
        num_bytes = len(json.dumps(reply))
    except NotJsonError as error:
        return failed_call(BAD_RETURN, f"{name}: {error}; the state travels with the episode as JSON")
    except RecursionError:
        return failed_call(BAD_RETURN, f"{name}: state or info is nested too deeply")
    if num_bytes > MAX_USER_REPLY_BYTES:
        limit = MAX_USER_REPLY_BYTES >> 10
        return failed_call(
            BAD_RETURN, f"{name}: the reply has {num_bytes >> 10} KiB as JSON, at most {limit} KiB; shorten the state"
        )
    return CallOutcome(reply)
