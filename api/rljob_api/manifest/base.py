"""The base of every type in a manifest: camelCase names, unknown fields refused, docstrings as descriptions.

Owns also what crosses fields: a Rule says it once, for Python and for the API server (CEL). Invariant: what the
generated schema refuses, Python refuses, with the same remedy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    model_serializer,
    model_validator,
)
from pydantic.alias_generators import to_camel

ShortText = Annotated[str, Field(min_length=1, max_length=256)]
PathText = Annotated[str, Field(min_length=1, max_length=1024)]
LongText = Annotated[str, Field(max_length=16384)]
# Bounds, so that the API server can tell beforehand what its rules cost.

OBJECT_NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
PART_NAME_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
QUANTITY_PATTERN = r"^[0-9]+(\.[0-9]+)?([KMGTPE]i|[numkMGTPE]|[eE][-+]?[0-9]+)?$"
URL_PATTERN = r"^https?://"
MODULE_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*([.][A-Za-z_][A-Za-z0-9_]*)*$"
REQUIREMENT_PATTERN = r"^[A-Za-z0-9][^\r\n]*$"
PATTERN_MESSAGES = {
    OBJECT_NAME_PATTERN: "must be lower-case letters, digits and '-', and begin with a letter",
    PART_NAME_PATTERN: "must be lower-case letters, digits and '-'",
    QUANTITY_PATTERN: "must be a Kubernetes quantity such as 500m, 2 or 16Gi",
    URL_PATTERN: "must begin with http:// or https://",
    MODULE_PATTERN: "must be a module's dotted name, such as package.module",
    REQUIREMENT_PATTERN: "must be one requirement, such as math-verify==0.8.0",
}
"""What a pattern means, for messages."""


@dataclass(frozen=True)
class Rule:
    """Something that must hold across fields."""

    fields: tuple[str, ...]
    """Paths below the type that has the rule, in camelCase. The first is the one to blame; "" is the whole."""
    message: str
    """What the first field must be."""
    remedy: str
    """What to do about it."""
    holds: Callable[[Any], bool]
    """The check in Python, on a validated object."""
    cel: str
    """The same check in CEL, over `self`. Empty where the field's own schema already says it."""


DEFER_RULES: Final = {"rules": "later"}
"""Validation context of a caller that checks the rules itself, so as to report them beside errors in fields."""


@dataclass(frozen=True)
class ClusterRule:
    """Something that only the API server asks: what may not change (oldSelf), or what no cluster could resolve."""

    field: str
    """Path of the field to blame, below the type that has the rule."""
    message: str
    """What is so of the field, remedy included; a predicate to its path."""
    cel: str
    """Expression over `self`, and `oldSelf` where it compares with what was there."""


class Spec(BaseModel):
    """A piece of a manifest. Python says `learning_rate`, YAML says `learningRate`."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )

    RULES: ClassVar[tuple[Rule, ...]] = ()
    """What must hold across the fields of this type."""
    CLUSTER_RULES: ClassVar[tuple[ClusterRule, ...]] = ()
    """What the API server asks besides."""

    @model_validator(mode="after")
    def _validate_rules(self, info: ValidationInfo) -> Any:
        if info.context is DEFER_RULES:
            return self
        broken = [rule for rule in self.RULES if not rule.holds(self)]
        if broken:
            text = "; ".join(f"{rule.fields[0]} {describe_violation(rule, self)}".strip() for rule in broken)
            raise ValueError(text)
        return self

    @model_serializer(mode="wrap")
    def _serialize_explicit_nulls(self, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> Any:
        # Where the default is a value, null is a choice of its own ('off'), and leaving it out would undo that choice.
        data = handler(self)
        if info.exclude_none:
            for name, field in type(self).model_fields.items():
                if field.default is not None and not field.is_required() and getattr(self, name) is None:
                    data[(field.alias or name) if info.by_alias else name] = None
        return data

    def to_manifest(self) -> dict[str, Any]:
        """Plain data as YAML would hold it: camelCase keys; nulls left out but for those that mean something."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


def describe_violation(rule: Rule, model: Spec) -> str:
    """The rule's message with the values that broke it, and its remedy."""
    values = {path: _lookup(model, path) for path in rule.fields if path}
    blamed, *others = rule.fields
    got = f", got {values[blamed]}" if blamed and values[blamed] is not None else ""
    beside = ", ".join(f"{path} is {values[path]}" for path in others if values[path] is not None)
    return f"{rule.message}{got}{f' ({beside})' if beside else ''}; {rule.remedy}"


def _lookup(value: Any, path: str) -> Any:
    """The value at a camelCase path; None where something on the way is null, or where it is nothing to show."""
    for alias in path.split("."):
        if value is None:
            return None
        value = next(getattr(value, n) for n, f in type(value).model_fields.items() if (f.alias or n) == alias)
    return None if isinstance(value, BaseModel | dict | list | bool) else value


class ObjectMeta(Spec):
    """The part of Kubernetes' ObjectMeta that RLJob reads. The API server fills in the rest."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1, max_length=40, pattern=OBJECT_NAME_PATTERN)
    """Name of the object: a DNS label of at most 40 characters that begins with a letter, since children add a
    suffix to it."""
    namespace: str = "default"
    """Namespace of the object and of all its children."""
    labels: dict[str, str] = {}
    """Labels, copied to no child."""
    annotations: dict[str, str] = {}
    """Annotations, copied to no child."""
    uid: str = ""
    """Set by the API server; owner references carry it."""
    generation: int = 1
    """Set by the API server: counts the changes of spec."""
