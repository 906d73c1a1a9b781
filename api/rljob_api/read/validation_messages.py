"""What pydantic found wrong, in plain words with a remedy, and what an unknown field may have been meant to be.

Pure text: load decides what to check, documents know the lines. Invariant: no name of Python or pydantic gets out.
"""

from __future__ import annotations

import difflib
import textwrap
import types
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.alias_generators import to_camel

from rljob_api.manifest.base import PATTERN_MESSAGES, Spec
from rljob_api.read.documents import Location, format_path

_MAX_VALUE_CHARACTERS = 60
_MAX_DESCRIPTION_CHARACTERS = 100
_MAX_LISTED = 12


def describe_error(root: type[Spec], kind: str, location: Location, value: Any, context: dict[str, Any]) -> str:
    """What is wrong with the value at a location, of pydantic's kind of error; a predicate to its path."""
    if kind == "extra_forbidden":
        return _describe_unknown(root, location)
    if kind == "missing":
        return f"is required{_meaning(root, location)}"
    if kind == "literal_error":
        return _describe_choice(root, location, value)
    words = _MESSAGES.get(kind)
    message = words(context) if words else "has no valid value"
    return f"{message}, got {format_value(value)}{_remedy(kind, value)}"


_MESSAGES: dict[str, Callable[[dict[str, Any]], str]] = {
    "greater_than_equal": lambda c: f"must be at least {c['ge']:.12g}",
    "greater_than": lambda c: f"must be more than {c['gt']:.12g}",
    "less_than_equal": lambda c: f"must be at most {c['le']:.12g}",
    "less_than": lambda c: f"must be less than {c['lt']:.12g}",
    "int_type": lambda c: "must be a whole number",
    "int_from_float": lambda c: "must be a whole number",
    "int_parsing": lambda c: "must be a whole number",
    "float_type": lambda c: "must be a number",
    "float_parsing": lambda c: "must be a number",
    "finite_number": lambda c: "must be a finite number",
    "bool_type": lambda c: "must be true or false",
    "bool_parsing": lambda c: "must be true or false",
    "string_type": lambda c: "must be text",
    "string_too_short": lambda c: _at_least(c["min_length"], "character"),
    "string_too_long": lambda c: f"must have at most {c['max_length']} characters",
    "too_short": lambda c: _at_least(c["min_length"], "entry"),
    "too_long": lambda c: f"must have at most {c['max_length']} entries",
    "string_pattern_mismatch": lambda c: PATTERN_MESSAGES.get(c["pattern"], f"must match {c['pattern']}"),
    "list_type": lambda c: "must be a list (lines that begin with '-')",
    "dict_type": lambda c: "must be a mapping (name: value)",
    "model_type": lambda c: "must be a mapping (name: value)",
    "model_attributes_type": lambda c: "must be a mapping (name: value)",
    "datetime_from_date_parsing": lambda c: "must be a time such as 2026-01-31T12:00:00Z",
    "datetime_parsing": lambda c: "must be a time such as 2026-01-31T12:00:00Z",
}


def _at_least(number: int, unit: str) -> str:
    plural = {"character": "characters", "entry": "entries"}[unit]
    return "must not be empty" if number == 1 else f"must have at least {number} {plural}"


def _remedy(kind: str, value: Any) -> str:
    if kind == "string_type" and isinstance(value, int | float):
        return "; put it in quotes"
    if kind in ("int_type", "float_type", "bool_type") and isinstance(value, str):
        return "; write it without quotes" if kind != "bool_type" else ""
    return ""


def format_value(value: Any) -> str:
    """A value as YAML's reader knows it, short."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "an empty list"
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= _MAX_VALUE_CHARACTERS else f"{text[:_MAX_VALUE_CHARACTERS]}..."


def find_similar_field(root: type[Spec], location: Location) -> Location | None:
    """Where the field is that an unknown name was meant to be, at the same level; None when none is near."""
    holder = type_at(root, location[:-1])
    near = _nearest(_camel(location[-1]), field_names(holder)) if _is_spec(holder) else None
    return (*location[:-1], near) if near and near != location[-1] else None


def _camel(key: str | int) -> str:
    return to_camel(str(key)) if "_" in str(key) else str(key)


def _describe_unknown(root: type[Spec], location: Location) -> str:
    holder = type_at(root, location[:-1])
    known = field_names(holder) if _is_spec(holder) else []
    camel = _camel(location[-1])
    near = _nearest(camel, known)
    if near and near.lower() == camel.lower():
        return f"is unknown; did you mean {near}?"
    elsewhere = [path for path in _all_paths(root, ()) if path[-1] == camel and path[0] == "spec"]
    if elsewhere:
        return f"is unknown here; {camel} belongs in {format_path(elsewhere[0][:-1])}"
    if near:
        return f"is unknown; did you mean {near}?"
    more = ", ..." if len(known) > _MAX_LISTED else ""
    return f"is unknown; there are {', '.join(known[:_MAX_LISTED])}{more}"


def _nearest(word: str, choices: list[str]) -> str | None:
    by_lower = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return by_lower[near[0]] if near else None


def suggest(word: Any, choices: list[str]) -> str:
    """`; did you mean X?` when one of the choices is near, else nothing."""
    near = _nearest(word, choices) if isinstance(word, str) else None
    return f"; did you mean {near}?" if near else ""


def _describe_choice(root: type[Spec], location: Location, value: Any) -> str:
    choices = [str(choice) for choice in get_args(_strip(type_at(root, location)))]
    listed = choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    return f"must be {listed}, got {format_value(value)}{suggest(value, choices) if len(choices) > 1 else ''}"


def _meaning(root: type[Spec], location: Location) -> str:
    holder = type_at(root, location[:-1])
    if not _is_spec(holder):
        return ""
    for name, field in holder.model_fields.items():
        if (field.alias or name) == location[-1] and field.description:
            return (
                f": {textwrap.shorten(field.description.rstrip('.'), _MAX_DESCRIPTION_CHARACTERS, placeholder=' ...')}"
            )
    return ""


def type_at(root: Any, location: Location) -> Any:
    """The annotation of the field at a location; None where the types know none."""
    current: Any = root
    for part in location:
        current = _strip(current)
        if _is_spec(current):
            fields = current.model_fields.items()
            current = next((field.annotation for name, field in fields if (field.alias or name) == part), None)
        elif get_origin(current) in (list, dict):
            current = get_args(current)[-1]
        else:
            return None
    return _strip(current)


def _strip(annotation: Any) -> Any:
    """Without Annotated and without `| None`."""
    if get_origin(annotation) is Annotated:
        return _strip(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        inner = [argument for argument in get_args(annotation) if argument is not type(None)]
        return _strip(inner[0]) if len(inner) == 1 else annotation
    return annotation


def _is_spec(annotation: Any) -> typing.TypeGuard[type[Spec]]:
    return isinstance(annotation, type) and issubclass(annotation, Spec)


def field_names(model: type[Spec]) -> list[str]:
    """Names as YAML has them."""
    return [field.alias or name for name, field in model.model_fields.items()]


def _all_paths(model: Any, location: Location) -> Iterator[Location]:
    """Every path of a type, breadth first by object, lists shown as their first entry."""
    if not _is_spec(model):
        return
    inner = [((*location, field.alias or name), _strip(field.annotation)) for name, field in model.model_fields.items()]
    yield from (path for path, _ in inner)
    for path, annotation in inner:
        if get_origin(annotation) is list:
            yield from _all_paths(_strip(get_args(annotation)[0]), (*path, 0))
        else:
            yield from _all_paths(annotation, path)


def placeholder(annotation: Any) -> Any:
    """Some valid value of a type, so that the rest of a manifest with a hole can be looked at. None: there is none."""
    stripped = _strip(annotation)
    if stripped is str:
        return "x"
    if get_origin(stripped) is Literal:
        return get_args(stripped)[0]
    if get_origin(stripped) is list:
        return [placeholder(get_args(stripped)[0])]
    if _is_spec(stripped):
        fields = stripped.model_fields.items()
        return {field.alias or name: placeholder(field.annotation) for name, field in fields if field.is_required()}
    return None
