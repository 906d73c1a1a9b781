"""A simulated user: `respond` as a function or a method, called by parameter names; and the reading of its reply.

Calls share nothing: `state` comes with the request, the function changes or replaces it, and the reply returns it.
Invariant: a reply is the fields of a UserReply as JSON, of a bounded size, or a reason.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from rljob_api.functions import named_forms
from rljob_api.functions.descriptions import Function
from rljob_api.wire.contract import MAX_USER_REPLY_BYTES
from rljob_service.worker.forms.binding import CallBinding
from rljob_service.worker.forms.json_values import to_json, to_log
from rljob_service.worker.forms.outcome import BAD_RETURN, EXCEPTION, CallOutcome, describe, failed_call
from rljob_service.worker.forms.reply_fields import WrongReplyError, build_reply, read_mapping, read_reward
from rljob_service.worker.forms.results import fields_of

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
        columns = _columns_of(arguments)
        values = {**_read_values(arguments), **{k: v for k, v in columns.items() if k in _ROW_OVERRIDES}}
        given = {**columns, **values, **kwargs}
        missing = [name for name in parameters.required if name not in given]
        if missing:
            found = ", ".join(columns) or "none"
            return failed_call(
                EXCEPTION,
                f"{parameters.show()} requires {', '.join(missing)}, which the row does not have (its other columns: "
                f"{found}); it may take {', '.join(named_forms.USER_VALUES)}",
            )
        return function(**{name: value for name, value in given.items() if parameters.accepts(name)})

    return CallBinding(call, lambda value, request: read(value, request["arguments"]["state"]))


def _columns_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    columns: dict[str, Any] = arguments.get("extra_info", {})
    return columns


def _read_values(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return what named_forms.USER_VALUES names, from the fields of a UserCall."""
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
        "extra_info": _columns_of(arguments),
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
    return _read_reply(fields["text"], fields.get("reward"), fields.get("info"), fields.get("state"))


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


def _read_reply(text: Any, reward: Any, info: Any, state: Any) -> CallOutcome:
    """Return a UserReply of these parts; a reason if one of them has another type than it must."""

    def build() -> dict[str, Any]:
        if text is not None and not isinstance(text, str):
            raise WrongReplyError(f"text is {describe(text)}; expected a str, or None to end")
        return {
            "text": to_json(text, "text"),
            "reward": read_reward(reward, "reward"),
            "state": to_json(read_mapping(state, "state"), "state"),
            "info": to_log(read_mapping(info, "info")),
        }

    return build_reply(build, named_forms.RESPOND, MAX_USER_REPLY_BYTES)
