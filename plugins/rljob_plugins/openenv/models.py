"""OpenEnv's actions and observations as text: from an answer to an Action, from an Observation to a message.

Reads Pydantic models by their public attributes. Standard library only.
"""

import inspect
import json
import typing
from collections.abc import Mapping
from typing import Any, Final

from rljob_api.errors import UserError
from rljob_service.worker.environments.stepping import NotAnActionError
from rljob_service.worker.forms.json_values import to_log

_BASE_FIELDS: Final = ("done", "reward", "metadata")
"""Fields of each Observation; an Action has metadata."""
_MAX_SHOWN_CHARACTERS: Final = 500


def find_action_class(environment: type) -> type:
    """Return the class of actions: the annotation of `step`, else the first type argument of the base class."""
    for method in ("step_async", "step"):
        function = inspect.getattr_static(environment, method, None)
        try:
            found = typing.get_type_hints(function).get("action")
        except (NameError, TypeError):
            found = None
        if inspect.isclass(found) and _is_model(found) and found.__name__ != "Action":
            return found
    for base in (each for kind in environment.__mro__ for each in getattr(kind, "__orig_bases__", ())):
        first = next(iter(typing.get_args(base)), None)
        first = typing.get_origin(first) or first
        if first is dict or _is_model(first):
            return typing.cast(type, first)
    raise UserError(
        f"{environment.__name__}: its class of actions is not known; annotate `action` of step with a subclass of "
        "openenv's Action"
    )


def _is_model(value: Any) -> bool:
    return inspect.isclass(value) and hasattr(value, "model_validate")


def read_action(action_class: type, text: str) -> Any:
    """Return the action of an answer: its text, if the action has one field of text, else its JSON object. Raise
    NotAnActionError."""
    field = _find_text_field(action_class)
    if field is not None:
        return action_class(**{field: text})
    expected = f"Reply with one JSON object{_describe(action_class)}."
    begin, end = text.find("{"), text.rfind("}")
    if not 0 <= begin < end:
        raise NotAnActionError(expected)
    try:
        value = json.loads(text[begin : end + 1])
        return value if action_class is dict else action_class.model_validate(value)  # type: ignore[attr-defined]
    except (ValueError, RecursionError) as error:  # ValidationError is a ValueError
        raise NotAnActionError(f"{expected} {str(error)[:_MAX_SHOWN_CHARACTERS]}") from None


def _find_text_field(action_class: type) -> str | None:
    fields = _own_fields(action_class)
    required = {name: field for name, field in fields.items() if field.is_required()}
    candidates = required or fields
    if len(candidates) != 1:
        return None
    name, field = next(iter(candidates.items()))
    return name if field.annotation is str else None


def _own_fields(model: type) -> dict[str, Any]:
    fields = getattr(model, "model_fields", {})
    return {name: field for name, field in fields.items() if name not in _BASE_FIELDS}


def _describe(action_class: type) -> str:
    names = _own_fields(action_class)
    return f" with the keys {', '.join(names)}" if names else ""


def show(observation: Any) -> str:
    """Return an observation as text: its only field if that is text, else its fields as JSON; empty without fields."""
    own = {key: value for key, value in dump(observation).items() if key not in _BASE_FIELDS}
    if len(own) == 1 and isinstance(only := next(iter(own.values())), str):
        return only
    return json.dumps(to_log(own), ensure_ascii=False) if own else ""


def show_result(observation: Any) -> str:
    """Return the result of a tool call as text: its error, the text of MCP's content, or anything else as JSON."""
    fields = dump(observation)
    if fields.get("error"):
        return json.dumps({"error": to_log(fields["error"])}, ensure_ascii=False)
    result = fields.get("result")
    parts = result.get("content") if isinstance(result, dict) else None
    if isinstance(parts, list) and parts and all(isinstance(each, dict) and "text" in each for each in parts):
        return "\n".join(each["text"] for each in parts)
    return result if isinstance(result, str) else json.dumps(to_log(result), ensure_ascii=False)


def dump(model: Any) -> dict[str, Any]:
    """Return the fields of a model, or of a dict."""
    dumped: dict[str, Any] = dict(model) if isinstance(model, Mapping) else model.model_dump(mode="json")
    return dumped
