"""The base of all manifest types: camelCase names, no unknown fields, docstrings as field descriptions.

Values of enumerations are lowerCamel, too. Names that belong to another project and that its users write, such as
flash_attention_2, are spelled as there.

Forms of a choice: kinds that share fields have a field `type` (agent, algorithm, schedule). Where each kind has its own
fields, it is a section, and a rule requires `exactly_one` of these sections (rewards, tools, user).

A `Rule` defines a constraint across fields once, for Python and for the API server (CEL). Invariant: Python rejects
what the generated schema rejects, with the same remedy.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel
from pydantic.fields import FieldInfo

# The API server estimates the cost of CEL rules from these bounds.
ShortText = Annotated[str, Field(min_length=1, max_length=256)]
PathText = Annotated[str, Field(min_length=1, max_length=1024)]
LongText = Annotated[str, Field(max_length=16384)]
ObjectName = Annotated[str, Field(min_length=1, max_length=253)]
"""Name of an existing Kubernetes object."""

OBJECT_NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
PART_NAME_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
REWARD_NAME_PATTERN = r"^[a-z0-9]([-_a-z0-9]*[a-z0-9])?$"
FUNCTION_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*$"
QUANTITY_PATTERN = r"^[0-9]+(\.[0-9]+)?([KMGTPE]i|[numkMGTPE]|[eE][-+]?[0-9]+)?$"
URL_PATTERN = r"^https?://"
OBJECT_PREFIX_PATTERN = r"^(s3|gs|az)://[A-Za-z0-9._-]+(/[A-Za-z0-9_=+@-][A-Za-z0-9._=+@-]*)*/?$"
"""A prefix that is also a path on every disk: no part is empty, or begins with a dot."""
MODULE_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*([.][A-Za-z_][A-Za-z0-9_]*)*$"
FACTORY_PATTERN = r"^([A-Za-z_][A-Za-z0-9_.]*|[^:]+[.]py):[A-Za-z_][A-Za-z0-9_]*$"
REQUIREMENT_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9+._-]*(\s*([\[@(;#:/][^\r\n]*|(==|[<>!~])[^\r\n]*[^\r\n<>=!~ ] *))?$"
PLUGIN_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
_DOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_QUALIFIED = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
DEVICE_PATTERN = rf"^{_DOMAIN}/{_QUALIFIED}$"
LABEL_KEY_PATTERN = rf"^({_DOMAIN}/)?{_QUALIFIED}$"
PATTERN_MESSAGES = {
    OBJECT_NAME_PATTERN: "must be lower-case letters, digits and '-', and begin with a letter",
    PART_NAME_PATTERN: "must be lower-case letters, digits and '-'",
    REWARD_NAME_PATTERN: "must be lower-case letters, digits, '-' and '_'",
    FUNCTION_PATTERN: "must be the name of a function",
    QUANTITY_PATTERN: "must be a Kubernetes quantity such as 500m, 2 or 16Gi",
    URL_PATTERN: "must begin with http:// or https://",
    OBJECT_PREFIX_PATTERN: "must be a prefix in object storage, such as s3://bucket/runs",
    MODULE_PATTERN: "must be a module's dotted name, such as package.module",
    FACTORY_PATTERN: "must be MODULE:NAME or FILE.py:NAME, such as my_package.tracking:start",
    REQUIREMENT_PATTERN: "must be one requirement alone, such as math-verify or math-verify==0.8.0",
    PLUGIN_PATTERN: "must be the name of an installed plugin: letters, digits, dots, hyphens and underscores",
    LABEL_KEY_PATTERN: "must be the key of a label such as topology.kubernetes.io/zone",
    DEVICE_PATTERN: "must be the name of a device such as nvidia.com/gpu: DOMAIN/NAME",
}

Url = Annotated[str, Field(pattern=URL_PATTERN, max_length=2048)]
ObjectPrefix = Annotated[str, Field(pattern=OBJECT_PREFIX_PATTERN, max_length=1024)]
Choice = Literal["auto", "always", "never"]
"""Values of a setting that RLJob decides unless the user does. The field says what auto means."""
PluginName = Annotated[str, Field(min_length=1, max_length=64, pattern=PLUGIN_PATTERN)]
PRESERVE: Final = "x-kubernetes-preserve-unknown-fields"
FreeForm = Annotated[dict[str, Any], Field(json_schema_extra={PRESERVE: True})]
"""A mapping with any fields."""


def decide(choice: Choice, *, automatic: bool) -> bool:
    """Return what a choice means. `automatic`: of auto."""
    return automatic if choice == "auto" else choice == "always"


def list_map(key: str) -> dict[str, pydantic.JsonValue]:
    """Return the schema extension of a list that server-side apply merges by `key`."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


@dataclass(frozen=True)
class Rule:
    """A constraint across the fields of a type."""

    fields: tuple[str, ...]
    """Paths below the type, in camelCase. Errors are reported at the first one; "" is the whole type."""
    message: str
    """What the first field must be."""
    remedy: str
    """How to fix it."""
    holds: Callable[[Any], bool]
    """The check in Python, on a validated object."""
    cel: str
    """The same check in CEL, over `self`. Empty if the field's schema already enforces it."""
    find_offenders: Callable[[Any], str] | None = None
    """Returns which entries of a list violate the rule, for Python's message."""
    is_ratcheted: bool = False
    """The rule is later than the objects that it could forbid: files are checked, and stored objects stay valid. The
    API server checks only changed values, if the rule belongs to a type without other fields that may change alone."""


def find_duplicates(field: str, names: list[str]) -> str:
    """`acc in rewards[0] and rewards[2]`."""
    places = {name: [f"{field}[{i}]" for i, other in enumerate(names) if other == name] for name in names}
    return ", ".join(f"{name} in {' and '.join(found)}" for name, found in places.items() if len(found) > 1)


def exactly_one(*fields: str, remedy: str = "set one and remove the others") -> Rule:
    """Return the rule that exactly one of these optional fields (in camelCase) is set."""

    def holds(model: Spec) -> bool:
        names = yaml_fields(type(model))
        return [getattr(model, names[field][0]) for field in fields].count(None) == len(fields) - 1

    given = [f"has(self.{field})" for field in fields]
    cel = " != ".join(given) if len(given) == 2 else f"[{', '.join(given)}].filter(given, given).size() == 1"
    return Rule(("",), f"must have exactly one of {', '.join(fields)}", remedy, holds, cel)


def different_names(field: str, message: str = "must have different names") -> Rule:
    """Return the rule that no two entries of a list have the same name. `message`: a type's rules need different ones.
    The API server enforces it with x-kubernetes-list-type: map (`list_map`)."""

    def names(model: Spec) -> list[str]:
        return [entry.name for entry in getattr(model, field)]

    return Rule(
        (field,),
        message,
        "rename one of them",
        lambda model: len(set(names(model))) == len(names(model)),
        "",
        lambda model: find_duplicates(field, names(model)),
    )


SINCE_START: Final = {"defaults": "of the job's start"}
"""Serialization context: leave out what had its default when the job first started."""
DEFER_RULES: Final = {"rules": "later"}
"""Validation context of a caller that checks the rules itself, to report them together with field errors."""


@dataclass(frozen=True)
class ClusterRule:
    """A constraint that only the API server checks: immutability (oldSelf), and sources that a cluster can resolve."""

    field: str
    """Path of the field below the type."""
    message: str
    """What the field must be and the remedy; a predicate to the path."""
    cel: str
    """Expression over `self`, and over `oldSelf` for immutability."""


class Spec(BaseModel):
    """A part of a manifest. The Python name `learning_rate` is `learningRate` in YAML."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
        defer_build=True,  # each program uses some of the types, and builds these alone: starts take half as long
    )

    _changed_defaults: dict[str, Any] = pydantic.PrivateAttr(default_factory=dict)
    RULES: ClassVar[tuple[Rule, ...]] = ()
    CLUSTER_RULES: ClassVar[tuple[ClusterRule, ...]] = ()

    @property
    def changed_defaults(self) -> dict[str, Any]:
        """By Python name, the defaults that the job keeps and this version has changed (`kept_defaults`)."""
        return self._changed_defaults

    @pydantic.model_validator(mode="after")
    def _validate_rules(self, info: pydantic.ValidationInfo) -> Any:
        if info.context is DEFER_RULES or not self.RULES:
            return self
        violated = [rule for rule in self.RULES if not rule.is_ratcheted and not rule.holds(self)]
        if violated:
            raise ValueError(
                "; ".join(f"{rule.fields[0]} {describe_violation(rule, self)}".strip() for rule in violated)
            )
        return self

    @pydantic.model_serializer(mode="wrap")
    def _serialize_explicit_nulls(
        self, handler: pydantic.SerializerFunctionWrapHandler, info: pydantic.SerializationInfo
    ) -> Any:
        # If the default is a value, null means "off" and must not be left out.
        data = handler(self)
        if info.exclude_none:
            for name, field in type(self).model_fields.items():
                if field.default is not None and not field.is_required() and getattr(self, name) is None:
                    data[(field.alias or name) if info.by_alias else name] = None
        if info.context is SINCE_START:
            for field in type(self).model_fields.values():
                if isinstance(field.default, Spec) and data.get(field.alias) == {}:
                    del data[field.alias]
            for name, default in self._changed_defaults.items():
                field, value = type(self).model_fields[name], getattr(self, name)
                if value == default:
                    data.pop(field.alias, None)
                elif value == field.default:
                    data[field.alias] = value
        return data

    def to_manifest(self, *, exclude: dict[str, Any] | None = None, exclude_defaults: bool = False) -> dict[str, Any]:
        """Return plain data for YAML: camelCase keys, without nulls except those that differ from the default.
        `exclude`: Python names, as in model_dump."""
        return self.model_dump(
            mode="json", by_alias=True, exclude_none=True, exclude=exclude, exclude_defaults=exclude_defaults
        )


def yaml_fields(model: type[BaseModel]) -> dict[str, tuple[str, FieldInfo]]:
    """Return YAML name -> (Python name, field)."""
    return {field.alias or name: (name, field) for name, field in model.model_fields.items()}


def describe_violation(rule: Rule, model: Spec) -> str:
    """Return the rule's message with the offending values, and its remedy."""
    values = {path: _lookup(model, path) for path in rule.fields if path}
    reported, *others = rule.fields
    value = rule.find_offenders(model) if rule.find_offenders else values[reported] if reported else None
    got = f", got {value}" if value is not None else ""
    related = ", ".join(f"{path} is {values[path]}" for path in others if values[path] is not None)
    return f"{rule.message}{got}{f' ({related})' if related else ''}; {rule.remedy}"


def _lookup(value: Any, path: str) -> Any:
    """Return the scalar at a camelCase path; None if a value on the way is null, or if it is not worth showing."""
    for alias in path.split("."):
        if value is None:
            return None
        value = getattr(value, yaml_fields(type(value))[alias][0])
    return None if isinstance(value, BaseModel | dict | list | bool) else value


class ObjectMeta(Spec):
    """The part of Kubernetes' ObjectMeta that RLJob reads. The API server sets the rest."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1, max_length=40, pattern=OBJECT_NAME_PATTERN)
    """Name of the object: a DNS label of at most 40 characters that begins with a letter. Children append a suffix."""
    namespace: str = "default"
    """Namespace of the object and of all its children."""
    labels: dict[str, str] = {}
    """Labels. Not copied to children."""
    annotations: dict[str, str] = {}
    """Annotations. Not copied to children."""
    uid: str = ""
    """Set by the API server. Owner references carry it."""
    generation: int = 1
    """Set by the API server: incremented on each change of spec."""
