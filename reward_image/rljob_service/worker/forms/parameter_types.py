"""From the type of a tool's parameter to JSON schema, which the model sees. Standard library only."""

import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

Schema = dict[str, Any]

SUPPORTED_TYPES: Final = "str, int, float, bool, list, dict, Literal[...], X | Y, Optional[X] or Any"
_NAMES: Final = {bool: "boolean", str: "string", int: "integer", float: "number", type(None): "null"}


class UnsupportedTypeError(Exception):
    """A type without a JSON schema; the text shows it."""


def schema_of(hint: Any) -> Schema:
    """Return the JSON schema of a resolved annotation. Raise UnsupportedTypeError."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    kind = origin or hint
    if origin is typing.Annotated:
        texts = [each for each in arguments[1:] if isinstance(each, str)]
        return schema_of(arguments[0]) | ({"description": texts[0]} if texts else {})
    if kind in (typing.Union, types.UnionType):
        return _union(map(schema_of, arguments))
    if kind is typing.Literal:
        return _literal(hint, arguments)
    if kind is Any or kind in _NAMES:
        return {} if kind is Any else {"type": _NAMES[kind]}
    if kind in (list, Sequence):
        items = schema_of(arguments[0]) if arguments else {}
        return {"type": "array", **({"items": items} if items else {})}
    if kind in (dict, Mapping) and arguments[:1] in ((), (str,)):
        values = schema_of(arguments[1]) if arguments else {}
        return {"type": "object", **({"additionalProperties": values} if values else {})}
    raise UnsupportedTypeError(getattr(hint, "__name__", str(hint)) if origin is None else str(hint))


def _union(members: Iterable[Schema]) -> Schema:
    schemas: list[Schema] = []
    for member in members:
        schemas += [each for each in member.get("anyOf", [member]) if each not in schemas]
    if {} in schemas:  # Any
        return {}
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _literal(hint: Any, values: Sequence[Any]) -> Schema:
    names = {_NAMES.get(type(value), "") for value in values}
    if "" in names:
        raise UnsupportedTypeError(str(hint))
    return {"type": names.pop(), "enum": list(values)} if len(names) == 1 else {"enum": list(values)}
