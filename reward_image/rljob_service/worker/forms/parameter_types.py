"""Types of a tool's parameters: as text, as JSON schemas, and as values.

Builds what a function expects from JSON that fits its schema: records as their classes, members of an Enum. Standard
library only.
"""

import dataclasses
import enum
import types
import typing
from collections.abc import Mapping
from typing import Any, Final

from rljob_api.functions.annotations import Schema, UnsupportedTypeError, schema_of
from rljob_service.worker.forms.arguments import ArgumentError, fits

_MARKS: Final = ("Required", "NotRequired", "ReadOnly")
_TYPE_NAMES: Final = ((bool, "boolean"), (str, "string"), (int, "integer"), (float, "number"))


class Classes:
    """The classes that the types of a function name: Enum, TypedDict and dataclass."""

    def __init__(self) -> None:
        self.schemas: dict[str, Schema] = {}
        """By the name in the text of a type."""
        self._names: dict[type, str] = {}

    def show(self, annotation: Any) -> str:
        """Return a type as its source would write it. Raise UnsupportedTypeError for a class without a schema."""
        origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
        if origin is None:
            if _is_enum(annotation) or _is_record(annotation):
                return self._add(annotation)
            name = getattr(annotation, "__name__", None)
            return name if isinstance(name, str) and name.isidentifier() else str(annotation)
        if origin in (typing.Union, types.UnionType):
            return " | ".join(map(self.show, arguments))
        if origin is typing.Literal:
            return f"Literal[{', '.join(map(repr, arguments))}]"
        if origin is typing.Annotated:
            return f"Annotated[{', '.join([self.show(arguments[0]), *map(_show_extra, arguments[1:])])}]"
        return f"{origin.__name__}[{', '.join(map(self.show, arguments))}]"

    def _add(self, cls: type) -> str:
        """Return the name of a class, with its schema in `schemas`."""
        if cls in self._names:
            name = self._names[cls]
            if name not in self.schemas:
                raise UnsupportedTypeError(f"{cls.__name__} (it contains itself)")
            return name
        is_taken = cls.__name__ in self._names.values()
        name = self._names[cls] = f"{cls.__name__}_{len(self._names)}" if is_taken else cls.__name__
        self.schemas[name] = self._describe_enum(cls) if _is_enum(cls) else self._describe_record(cls)
        return name

    def _describe_enum(self, cls: Any) -> Schema:
        values = [member.value for member in cls]
        names = {next((name for kind, name in _TYPE_NAMES if isinstance(value, kind)), "") for value in values}
        if "" in names or not values:
            raise UnsupportedTypeError(f"{cls.__name__} (its values are not str, int, float or bool)")
        return {"type": names.pop(), "enum": values} if len(names) == 1 else {"enum": values}

    def _describe_record(self, cls: type) -> Schema:
        properties: dict[str, Schema] = {}
        required = []
        for name, hint, is_required in _fields(cls):
            try:
                properties[name] = schema_of(self.show(hint), self.schemas)
            except UnsupportedTypeError as error:
                raise UnsupportedTypeError(f"{cls.__name__} (its field {name} is {error.annotation})") from None
            required += [name] if is_required else []
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def build(annotation: Any, value: Any, place: str) -> Any:
    """Return what a function expects for JSON that fits the schema of its type. Raise ArgumentError if the class
    refuses it."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return build(_choose(arguments, value), value, place)
    if origin is typing.Annotated:
        return build(arguments[0], value, place)
    if isinstance(value, list) and arguments:
        return [build(arguments[0], each, f"{place}[{index}]") for index, each in enumerate(value)]
    if isinstance(value, dict) and len(arguments) == 2:
        return {key: build(arguments[1], each, f"{place}.{key}") for key, each in value.items()}
    if _is_enum(annotation):
        return next(member for member in annotation if _is_same(member.value, value))
    if isinstance(value, dict) and _is_record(annotation):
        hints = {name: hint for name, hint, _ in _fields(annotation)}
        return _make(annotation, {key: build(hints[key], each, f"{place}.{key}") for key, each in value.items()}, place)
    return value


def plain(value: Any) -> Any:
    """Return a default without records and members of an Enum."""
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def _make(cls: type, values: dict[str, Any], place: str) -> Any:
    try:
        return cls(**values)
    except Exception as error:  # the class checks its fields
        raise ArgumentError(f"{place} is not a {cls.__name__}: {error}") from None


def _choose(members: tuple[Any, ...], value: Any) -> Any:
    """Return the member of a union whose schema the value fits; the value itself was checked."""
    for member in members:
        classes = Classes()
        if fits(schema_of(classes.show(member), classes.schemas), value):
            return member
    return None


def _fields(cls: type) -> list[tuple[str, Any, bool]]:
    """Return the name, type, and whether it is required, of each field of a dataclass or TypedDict."""
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except Exception as error:  # a forward reference that does not exist
        raise UnsupportedTypeError(f"{cls.__name__} (its types cannot be resolved: {error})") from None
    if dataclasses.is_dataclass(cls):
        return [(each.name, hints[each.name], _is_required(each)) for each in dataclasses.fields(cls) if each.init]
    keys: frozenset[str] = getattr(cls, "__required_keys__", frozenset())
    return [(key, *_unmark(hint, is_required=key in keys)) for key, hint in hints.items()]


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _unmark(hint: Any, *, is_required: bool) -> tuple[Any, bool]:
    """Return a type without Required and NotRequired, which __required_keys__ lacks if annotations are text."""
    mark = getattr(typing.get_origin(hint), "_name", "")
    if mark not in _MARKS:
        return hint, is_required
    return _unmark(typing.get_args(hint)[0], is_required=(mark == "Required" or (is_required and mark == "ReadOnly")))


def _is_enum(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, enum.Enum)


def _is_record(annotation: Any) -> bool:
    is_class = isinstance(annotation, type)
    is_typed_dict = is_class and issubclass(annotation, dict) and hasattr(annotation, "__required_keys__")
    return is_class and (is_typed_dict or dataclasses.is_dataclass(annotation))


def _is_same(left: Any, right: Any) -> bool:
    return isinstance(left, bool) == isinstance(right, bool) and bool(left == right)


def _show_extra(extra: Any) -> str:
    return repr(extra) if isinstance(extra, str) else "None"
