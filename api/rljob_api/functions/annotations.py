"""From the text of a type annotation to JSON schema: what the model sees of a tool's parameter. Pure.

A worker turns its types into text, which is what messages show.
"""

import ast
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

Schema = dict[str, Any]

SUPPORTED_TYPES: Final = (
    "str, int, float, bool, list, dict, Literal[...], X | Y, Optional[X], Any, a TypedDict, a dataclass, or an Enum"
)

_SIMPLE: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "str": {"type": "string"},
        "int": {"type": "integer"},
        "float": {"type": "number"},
        "bool": {"type": "boolean"},
        "None": {"type": "null"},
        "NoneType": {"type": "null"},
        "Any": {},
    }
)
_LISTS: Final = ("list", "List", "Sequence")
_DICTS: Final = ("dict", "Dict", "Mapping")
_TYPE_NAMES: Final = ((bool, "boolean"), (str, "string"), (int, "integer"), (type(None), "null"))


class UnsupportedTypeError(Exception):
    """An annotation without a JSON schema."""

    def __init__(self, annotation: str) -> None:
        super().__init__(annotation)
        self.annotation = annotation


_NO_CLASSES: Final[Mapping[str, Schema]] = MappingProxyType({})


def schema_of(annotation: str, classes: Mapping[str, Schema] = _NO_CLASSES) -> Schema:
    """Return the JSON schema of an annotation, such as `list[int] | None`. Raise UnsupportedTypeError.

    `classes`: the schemas of classes by name."""
    try:
        node = ast.parse(annotation.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise UnsupportedTypeError(annotation) from None
    return _schema(node, classes)


def _schema(node: ast.expr, classes: Mapping[str, Schema]) -> Schema:
    if isinstance(node, ast.Constant):
        if node.value is None:
            return dict(_SIMPLE["None"])
        if isinstance(node.value, str):  # a forward reference
            return schema_of(node.value, classes)
    elif isinstance(node, (ast.Name, ast.Attribute)):
        name = _name(node)
        if name in _SIMPLE:
            return dict(_SIMPLE[name])
        if name in _LISTS or name in _DICTS:
            return {"type": "array" if name in _LISTS else "object"}
        if name in classes:
            return dict(classes[name])
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union(list(_members(node)), classes)
    elif isinstance(node, ast.Subscript):
        return _subscript(node, classes)
    raise _unsupported(node)


def _subscript(node: ast.Subscript, classes: Mapping[str, Schema]) -> Schema:
    name = _name(node.value)
    arguments = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if name == "Literal":
        return _literal(node, arguments)
    if name == "Union":
        return _union(arguments, classes)
    if name == "Optional" and len(arguments) == 1:
        return _union([*arguments, ast.Constant(None)], classes)
    if name == "Annotated":
        texts = [each.value for each in arguments[1:] if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        return _schema(arguments[0], classes) | ({"description": texts[0]} if texts else {})
    if name in _LISTS and len(arguments) == 1:
        items = _schema(arguments[0], classes)
        return {"type": "array", "items": items} if items else {"type": "array"}
    if name in _DICTS and len(arguments) == 2 and _schema(arguments[0], classes) == _SIMPLE["str"]:
        values = _schema(arguments[1], classes)
        return {"type": "object", "additionalProperties": values} if values else {"type": "object"}
    raise _unsupported(node)


def _union(members: list[ast.expr], classes: Mapping[str, Schema]) -> Schema:
    schemas: list[Schema] = []
    for member in members:
        schema = _schema(member, classes)
        schemas += [each for each in schema.get("anyOf", [schema]) if each not in schemas]
    if {} in schemas:  # Any
        return {}
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _literal(node: ast.Subscript, arguments: list[ast.expr]) -> Schema:
    try:
        values = [ast.literal_eval(argument) for argument in arguments]
    except ValueError:
        raise _unsupported(node) from None
    names = {next((name for kind, name in _TYPE_NAMES if isinstance(value, kind)), "") for value in values}
    if "" in names or not values:
        raise _unsupported(node)
    return {"type": names.pop(), "enum": values} if len(names) == 1 else {"enum": values}


def _members(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        yield from _members(node.left)
        yield from _members(node.right)
    else:
        yield node


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _unsupported(node: ast.expr) -> UnsupportedTypeError:
    return UnsupportedTypeError(ast.unparse(node))
