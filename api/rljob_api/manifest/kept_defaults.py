"""The defaults with which a job first started, and which it keeps under a version that has others. Pure.

The status has them by path: of each section that the job has; those of a list belong to all of its entries. A part or a
field that comes later gets the defaults of the version that reads it first. Null is no default: it stays what it means.
"""

from collections.abc import Mapping
from typing import Any, get_args

from rljob_api.manifest.base import Spec, yaml_fields


def read_defaults(part: Spec) -> dict[str, Any]:
    """Return what fields have that are left out, of the parts that there are."""
    found = dict[str, Any]()
    for name, (attribute, field) in yaml_fields(type(part)).items():
        for section in _list_sections(getattr(part, attribute)):
            found[name] = merge_defaults(found.get(name, {}), read_defaults(section))
        if find_part(field.annotation) is None and not field.is_required() and field.default is not None:
            found[name] = field.default
    return {name: value for name, value in found.items() if value != {}}


def merge_defaults(defaults: Mapping[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return both. What is kept counts."""
    sections = {
        name: merge_defaults(defaults[name], value)
        for name, value in kept.items()
        if isinstance(value, dict) and isinstance(defaults.get(name), dict)
    }
    return {**defaults, **kept, **sections}


def fill_in(part: type[Spec], manifest: Mapping[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return a spec as it is stored with the kept defaults. What this version does not know is left out."""
    result = dict(manifest)
    for name, (_, field) in yaml_fields(part).items():
        section, value = find_part(field.annotation), result.get(name)
        if name not in kept:
            continue
        if section is None:
            result.setdefault(name, kept[name])
        elif isinstance(value, list):
            result[name] = [fill_in(section, each, kept[name]) for each in value]
        elif isinstance(value, dict) or (name not in result and isinstance(field.default, Spec)):
            result[name] = fill_in(section, value or {}, kept[name])
    return result


def remember(part: Spec, kept: Mapping[str, Any]) -> None:
    """Let the parts know the kept defaults that this version has changed, for digests of what a user has set."""
    for name, (attribute, field) in yaml_fields(type(part)).items():
        for section in _list_sections(getattr(part, attribute)):
            remember(section, kept.get(name, {}))
        if name in kept and find_part(field.annotation) is None and kept[name] != field.default:
            part.changed_defaults[attribute] = kept[name]


def find_part(annotation: Any) -> type[Spec] | None:
    """The type of an object, also of an optional one, or of those of a list."""
    if isinstance(annotation, type) and issubclass(annotation, Spec):
        return annotation
    return next(filter(None, map(find_part, get_args(annotation))), None)


def _list_sections(value: Any) -> list[Spec]:
    return [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, Spec)]
