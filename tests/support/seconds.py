"""Objects of the manifest with durations of fractions of a second, which tests need and the product refuses."""

from __future__ import annotations

from typing import Any, TypeVar

from rljob_api.manifest.base import Spec, yaml_fields

Part = TypeVar("Part", bound=Spec)


def validate(model: type[Part], fields: dict[str, Any]) -> Part:
    """Validate the fields with whole seconds, and put the fractions in their places."""
    built = model.model_validate(round_up(fields))
    restore(built, fields)
    return built


def _is_fraction(name: str, value: Any) -> bool:
    return name.endswith("Seconds") and isinstance(value, float) and value % 1 != 0


def round_up(fields: Any) -> Any:
    """Return the fields of a manifest with whole seconds."""
    if not isinstance(fields, dict):
        return fields
    return {name: int(value) + 1 if _is_fraction(name, value) else round_up(value) for name, value in fields.items()}


def restore(part: Any, fields: dict[str, Any]) -> None:
    """Put the fractions of `fields` into what was built from them."""
    for name, value in fields.items():
        if _is_fraction(name, value):
            setattr(part, yaml_fields(type(part))[name][0], value)
        elif isinstance(value, dict) and name in yaml_fields(type(part)):
            inner = getattr(part, yaml_fields(type(part))[name][0])
            if isinstance(inner, Spec):
                restore(inner, value)
