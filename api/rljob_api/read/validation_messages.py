"""Turn pydantic's validation errors into messages with a remedy, and suggest the intended name of an unknown field.

Pure functions over types and values. Invariant: no message contains a name of Python or pydantic.

The types of fields are looked up by their location in a manifest.
"""

import difflib
import textwrap
import types
import typing
from collections.abc import Callable, Iterator
from operator import eq
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.alias_generators import to_camel

from rljob_api.manifest.base import PATTERN_MESSAGES, Spec, yaml_fields
from rljob_api.read.documents import Location, format_path

_MAX_VALUE_CHARACTERS = 60
_MAX_DESCRIPTION_CHARACTERS = 100
_MAX_LISTED = 12


def describe_error(root: type[Spec], kind: str, location: Location, value: Any, context: dict[str, Any]) -> str:
    """Return what is wrong with the value at a location, for a pydantic error type; a predicate to its path."""
    if kind == "extra_forbidden":
        return _describe_unknown(root, location)
    if kind == "missing":
        return f"is required{_description(root, location)}"
    if kind == "literal_error":
        known = get_args(type_at(root, location))
        choices = [choice if isinstance(choice, str) else format_value(choice) for choice in known]
        message = describe_choice(value, choices, choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}")
        return message + (_description(root, location) if True in known else "")
    build = _MESSAGES.get(kind)
    message = build(context) if build else "has no valid value"
    return f"{message}, got {format_value(value)}{_remedy(kind, value)}"


def describe_choice(value: Any, choices: list[str], expected: str) -> str:
    near = _nearest(value, choices) if isinstance(value, str) and len(choices) > 1 else None
    return f"must be {expected}, got {format_value(value)}{f'; did you mean {near}?' if near else ''}"


_MESSAGES: dict[str, Callable[[dict[str, Any]], str]] = {
    "greater_than_equal": lambda c: f"must be at least {c['ge']:.12g}",
    "greater_than": lambda c: f"must be more than {c['gt']:.12g}",
    "less_than_equal": lambda c: f"must be at most {c['le']:.12g}",
    "less_than": lambda c: f"must be less than {c['lt']:.12g}",
    **dict.fromkeys(("int_type", "int_from_float", "int_parsing"), lambda c: "must be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), lambda c: "must be a number"),
    "finite_number": lambda c: "must be a finite number",
    **dict.fromkeys(("bool_type", "bool_parsing"), lambda c: "must be true or false"),
    "string_type": lambda c: "must be text",
    "string_too_short": lambda c: _at_least(c["min_length"], "characters"),
    "string_too_long": lambda c: f"must have at most {c['max_length']} characters",
    "too_short": lambda c: _at_least(c["min_length"], "entries"),
    "too_long": lambda c: f"must have at most {c['max_length']} entries",
    "string_pattern_mismatch": lambda c: PATTERN_MESSAGES.get(c["pattern"], f"must match {c['pattern']}"),
    "list_type": lambda c: "must be a list (lines that begin with '-')",
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), lambda c: "must be a mapping (name: value)"),
    **dict.fromkeys(
        ("datetime_from_date_parsing", "datetime_parsing"), lambda c: "must be a time such as 2026-01-31T12:00:00Z"
    ),
}


def _at_least(number: int, units: str) -> str:
    return "must not be empty" if number == 1 else f"must have at least {number} {units}"


def _remedy(kind: str, value: Any) -> str:
    if kind == "string_type" and isinstance(value, int | float):
        return "; put it in quotes"
    if kind in ("int_type", "float_type") and isinstance(value, str) and value.strip("-+.").isdigit():
        return "; write it without quotes"
    return ""


def format_value(value: Any) -> str:
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


def find_intended_field(root: type[Spec], location: Location) -> Location | None:
    """Return the field that an unknown name was probably meant to be: a similar sibling, or the same name elsewhere."""
    known = field_names(type_at(root, location[:-1]))
    if not known or location[-1] in known:
        return None
    near = _nearest_field(_camel(location[-1]), known)
    return (*location[:-1], near) if near else _find_elsewhere(root, location)


def _find_elsewhere(root: type[Spec], location: Location) -> Location | None:
    """Return the nearest field of the name: that which has most of its path in common, and among equals the shortest
    path; None if several have."""
    name = _camel(location[-1])
    found = [path for path in all_paths(root) if path[-1] == name and path[0] == "spec"]
    distances = [(-sum(map(eq, path, location)), len(path)) for path in found]
    return found[distances.index(min(distances))] if found and distances.count(min(distances)) == 1 else None


def _camel(key: str | int) -> str:
    return to_camel(str(key)) if "_" in str(key) else str(key)


def _describe_unknown(root: type[Spec], location: Location) -> str:
    known = field_names(type_at(root, location[:-1]))
    camel = _camel(location[-1])
    near = _nearest_field(camel, known)
    is_meant = near is not None and (near.lower() == camel.lower() or camel in _NAMES_OF_SOURCE)
    elsewhere = _find_elsewhere(root, location)
    if elsewhere and not is_meant:
        return f"is unknown here; {camel} belongs in {format_path(elsewhere[:-1])}"
    if near:
        return f"is unknown; did you mean {near}?"
    more = ", ..." if len(known) > _MAX_LISTED else ""
    return f"is unknown; known fields are {', '.join(known[:_MAX_LISTED])}{more}"


def _nearest_field(word: str, known: list[str]) -> str | None:
    return "source" if word in _NAMES_OF_SOURCE and "source" in known else _nearest(word, known)


_NAMES_OF_SOURCE = ("id", "name", "path")
"""Where models and data have a source."""


def _nearest(word: str, choices: list[str]) -> str | None:
    by_lower = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return by_lower[near[0]] if near else None


def _description(root: type[Spec], location: Location) -> str:
    text = yaml_fields(type_at(root, location[:-1]))[str(location[-1])][1].description or ""
    shown = textwrap.shorten(text.rstrip("."), _MAX_DESCRIPTION_CHARACTERS, placeholder=" ...")
    return f": {shown}" if shown else ""


def type_at(root: Any, location: Location) -> Any:
    """Return the annotation of the field at a location; None if the types do not define it."""
    current = unwrap(root)
    for part in location:
        if is_spec(current):
            fields = yaml_fields(current)
            current = fields[part][1].annotation if part in fields else None
        elif get_origin(current) in (list, dict):
            current = get_args(current)[-1]
        else:
            return None
        current = unwrap(current)
    return current


def unwrap(annotation: Any) -> Any:
    """Remove Annotated and `| None`."""
    if get_origin(annotation) is Annotated:
        return unwrap(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        inner = [argument for argument in get_args(annotation) if argument is not type(None)]
        return unwrap(inner[0]) if len(inner) == 1 else annotation
    return annotation


def is_spec(annotation: Any) -> typing.TypeGuard[type[Spec]]:
    return isinstance(annotation, type) and issubclass(annotation, Spec)


def field_names(annotation: Any) -> list[str]:
    """Return the YAML names of the fields of a Spec; empty for other types."""
    return list(yaml_fields(annotation)) if is_spec(annotation) else []


def all_paths(model: Any, location: Location = ()) -> Iterator[Location]:
    """Yield the location of every field below `model`, siblings first. Lists have the index 0."""
    if not is_spec(model):
        return
    inner = [((*location, alias), unwrap(field.annotation)) for alias, (_, field) in yaml_fields(model).items()]
    yield from (path for path, _ in inner)
    for path, annotation in inner:
        if get_origin(annotation) is list:
            yield from all_paths(unwrap(get_args(annotation)[0]), (*path, 0))
        else:
            yield from all_paths(annotation, path)


def placeholder(annotation: Any) -> Any:
    """Return a valid value of a type, to check the remainder of an invalid manifest; None if none is known."""
    annotation = unwrap(annotation)
    if annotation is str:
        return "x"
    if get_origin(annotation) is Literal:
        return get_args(annotation)[0]
    if get_origin(annotation) is list:
        return [placeholder(get_args(annotation)[0])]
    if is_spec(annotation):
        fields = yaml_fields(annotation).items()
        return {alias: placeholder(field.annotation) for alias, (_, field) in fields if field.is_required()}
    return None
