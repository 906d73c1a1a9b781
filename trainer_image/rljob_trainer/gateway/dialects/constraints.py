"""Requests that force a call or a form on the policy, for agent.constraints: ignore. Pure.

The engine could enforce them, but then the tokens would not be samples of the policy that trains. So the policy answers
as it would without them, the response names them, and the program's own checks decide. Invariant: all other fields
stay as they are; the dialects check them.
"""

from collections.abc import Mapping
from typing import Any

_FORMS = ("response_format", "output_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice")
_FORMS_WITHIN = ("text", "output_config")
"""Fields with a `format` in them: of the responses API, and of the messages API."""
_FREE = ("auto", "none", None)
_TEXT = {"type": "text"}
_NO_FORM: tuple[Any, ...] = (None, _TEXT, "", [], {})


def drop_constraints(body: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the request without forced calls and forms, and the fields that asked for them. A forced call becomes
    `auto`: the policy sees all tools."""
    kept = {name: value for name, value in body.items() if name not in _FORMS}
    dropped = [name for name in _FORMS if body.get(name) not in _NO_FORM]
    choice = body.get("tool_choice")
    if (choice.get("type") if isinstance(choice, dict) else choice) not in _FREE:
        kept["tool_choice"] = None
        dropped.append("tool_choice")
    for name in _FORMS_WITHIN:
        outer = body.get(name)
        if isinstance(outer, dict) and outer.get("format") not in _NO_FORM:
            kept[name] = {key: value for key, value in outer.items() if key != "format"}
            dropped.append(f"{name}.format")
    return kept, tuple(dropped)
