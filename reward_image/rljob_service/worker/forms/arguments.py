"""Checks what the policy wrote as the arguments of a tool against its schema, and converts what is meant unambiguously.

Converted are: "3" to an integer or a number, 3 to a number or a string, 3.0 to an integer, "true" and "false" to a
boolean, and a string that is JSON to an array or an object. Messages are written for the model: what is wrong, and what
was expected. Pure, standard library only.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final

from rljob_api.phrases import did_you_mean

Schema = Mapping[str, Any]

_INTEGER: Final = re.compile(r"\s*[+-]?\d{1,4000}\s*", re.ASCII)
_MAX_SHOWN_CHARACTERS: Final = 100
_MAX_PROBLEMS: Final = 8
_BOOLEANS: Final = {"true": True, "false": False}
_NOUNS: Final = {
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "array": "an array",
    "object": "an object",
    "null": "null",
}


class ArgumentError(Exception):
    """The arguments do not fit; the text is for the model."""


def check_arguments(name: str, parameters: Schema, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with their types. Raise ArgumentError, which names every problem."""
    properties: Mapping[str, Schema] = parameters["properties"]
    problems = [f"missing argument {each}" for each in parameters.get("required", ()) if each not in arguments]
    checked: dict[str, Any] = {}
    for key, value in arguments.items():
        if key not in properties:
            hint = did_you_mean(key[:_MAX_SHOWN_CHARACTERS], properties)
            problems.append(f"unknown argument {_shorten(key)}" + (f" ({hint})" if hint else ""))
            continue
        try:
            checked[key] = _check(properties[key], value, key)
        except ArgumentError as error:
            problems.append(str(error))
    if problems:
        shown = "; ".join(problems[:_MAX_PROBLEMS])
        raise ArgumentError(f"{shown}. Expected: {show_call(name, parameters)}")
    return checked


def show_call(name: str, parameters: Schema) -> str:
    """Return the function with the types of its parameters, such as `add(a: integer, b: integer = 1)`."""
    required = parameters.get("required", ())
    parts = []
    for key, schema in parameters["properties"].items():
        default = f" = {json.dumps(schema.get('default'), ensure_ascii=False)}" if key not in required else ""
        parts.append(f"{key}: {_show_type(schema)}{default}")
    return f"{name}({', '.join(parts)})"


def _check(schema: Schema, value: Any, place: str) -> Any:
    """Return the value with the type of the schema. Raise ArgumentError."""
    if "anyOf" in schema:
        return _check_any(schema, value, place)
    if "enum" in schema:
        return _check_enum(schema, value, place)
    kind = schema.get("type")
    if kind is None:
        return value
    value = _convert(kind, value)
    if not _is(kind, value):
        raise _wrong(schema, value, place)
    if kind == "array" and "items" in schema:
        return [_check(schema["items"], each, f"{place}[{index}]") for index, each in enumerate(value)]
    if kind == "object" and "additionalProperties" in schema:
        inner: Schema = schema["additionalProperties"]
        return {key: _check(inner, each, f"{place}.{_shorten(key)}") for key, each in value.items()}
    return value


def _check_any(schema: Schema, value: Any, place: str) -> Any:
    """Return the value as the first type that it has, or else that it can be converted to."""
    members: list[Schema] = schema["anyOf"]
    for member in sorted(members, key=lambda member: not fits(member, value)):
        try:
            return _check(member, value, place)
        except ArgumentError:
            continue
    raise _wrong(schema, value, place)


def fits(schema: Schema, value: Any) -> bool:
    """Return whether a value has the type of the schema without conversion."""
    try:
        checked = _check(schema, value, "")
    except ArgumentError:
        return False
    return _is_same(checked, value)


def _check_enum(schema: Schema, value: Any, place: str) -> Any:
    choices: list[Any] = schema["enum"]
    if any(_is_same(choice, value) for choice in choices):
        return value
    if isinstance(value, (str, int)):
        for choice in choices:
            if isinstance(choice, (str, int)) and _text(choice) == _text(value):
                return choice
    raise _wrong(schema, value, place)


def _is_same(left: Any, right: Any) -> bool:
    """Return whether two JSON values are equal, with booleans and numbers apart."""
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_is_same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_is_same(left[key], right[key]) for key in left)
    return isinstance(left, bool) == isinstance(right, bool) and bool(left == right)


def _is(kind: str, value: Any) -> bool:
    if kind == "integer":
        return isinstance(value, int) and not isinstance(value, bool)
    if kind == "number":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    types: dict[str, type] = {"string": str, "boolean": bool, "array": list, "object": dict, "null": type(None)}
    return isinstance(value, types[kind])


def _convert(kind: str, value: Any) -> Any:
    if isinstance(value, str):
        return _convert_text(kind, value)
    if isinstance(value, bool):
        return value
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind == "string" and isinstance(value, (int, float)):
        return json.dumps(value)
    return value


def _convert_text(kind: str, text: str) -> Any:
    if kind in ("integer", "number") and _INTEGER.fullmatch(text):
        return int(text)
    if kind == "number":
        try:
            number = float(text)
        except ValueError:
            return text
        return number if math.isfinite(number) else text
    if kind == "boolean":
        return _BOOLEANS.get(text.strip().lower(), text)
    if kind in ("array", "object"):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return text
        return value if _is(kind, value) else text
    return text


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _wrong(schema: Schema, value: Any, place: str) -> ArgumentError:
    shown = _shorten(json.dumps(value, ensure_ascii=False))
    return ArgumentError(f"{place} must be {_describe_type(schema)}, got {shown}")


def _describe_type(schema: Schema) -> str:
    if "anyOf" in schema:
        return " or ".join(map(_describe_type, schema["anyOf"]))
    if "enum" in schema:
        return f"one of {', '.join(json.dumps(choice, ensure_ascii=False) for choice in schema['enum'])}"
    noun = _NOUNS.get(schema.get("type", ""), "any value")
    return f"an array of {_show_type(schema['items'])}" if "items" in schema else noun


def _show_type(schema: Schema) -> str:
    if "anyOf" in schema:
        return " | ".join(map(_show_type, schema["anyOf"]))
    if "enum" in schema:
        return " | ".join(json.dumps(choice, ensure_ascii=False) for choice in schema["enum"])
    kind: str = schema.get("type", "any")
    return f"{kind}[{_show_type(schema['items'])}]" if "items" in schema else kind


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}..."
