"""Look up the types of fields by their location in a manifest."""

import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from rljob_api.manifest.base import Spec, yaml_fields
from rljob_api.read.documents import Location


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
