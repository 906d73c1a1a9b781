"""Build docs/reference.md: lists of all fields, from the schemas of the CRDs. Common fields are listed once.

Where an object has fields of one before it, its line names that one. `dev/on_change.py` finds what a change of each
field does, and writes the page.

It also builds the tables of a run's records, from the docstrings of their types. Pure.
"""

import inspect
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from rljob_api.manifest.base import yaml_fields
from rljob_api.manifest.immutable_fields import FIXED, RECORDED
from rljob_api.manifest.pod_settings import PodSettings
from rljob_api.manifest.roles import Role
from rljob_api.run.base import Record, Unit, find_mark, find_part
from rljob_api.run.gauges import Number, list_numbers
from rljob_api.run.metrics import AgentNumbers, EvaluationNumbers, EvaluationRecord, SourceNumbers, StepRecord
from rljob_api.run.trajectories import RecordedRow

Schema = dict[str, Any]

_INTRO = """<!-- Generated from api/rljob_api by `make generate`; edit the types there. -->
# Reference

All fields of `RLJob`, `RewardModel` and `RLJobPolicy` (`rljob.dev/v1alpha1`). Names are camelCase. Unknown fields are
rejected with the nearest known name. `rljob validate FILE` reports all errors of a file at once.

In parentheses are the type or the choices, and the default. What is not `required` may be left out; without a default,
the meaning says what then holds.
After the semicolon is what a change of the field does to a running job that trains, whose rollouts have Pods of their
own: which roles get new Pods (`own`: the role that has the field). If head or trainer do, the run starts again from its
last checkpoint; without a claim or storage, at step 0. [A warning](lifecycle.md#what-replaces-pods) tells it.
`reloaded`: the driver reads the field again. `none`: the operator acts by the new value, and replaces no Pod.

"Has the fields of `X`" stands for lines: `spec.data.eval` has the fields of `spec.data.train`, so there is
`spec.data.eval.source`, with the same type, default and meaning. On change: as there, or as the line says.

Relative paths in a job file are relative to the job file, not to the working directory.
"""
_ROLES = ("head", "trainer", "rollout", "rewards")
_COMMON = tuple(yaml_fields(Role))
_POD = tuple(yaml_fields(PodSettings))
_MIN_SHARED_CHARACTERS = 120
"""Fields whose descriptions are shorter have lines of their own."""
_RULES = """
`rljob validate` and the API server refuse these changes, and fields that do not fit each other, with the remedy. All
rules are under `x-kubernetes-validations` in [crds/](../crds/rljobs.rljob.dev.yaml).
"""

_CHANGES = re.compile(r" (Immutable|May change while the job runs)\.(?= |$)")

Effects = Mapping[str, str]
"""What a change of a field does, by its path without `spec.`."""


def build_reference(job: Schema, reward_model: Schema, policy: Schema, effects: Effects | None = None) -> str:
    listed = Listed(effects or {})
    spec, status = job["properties"]["spec"], job["properties"]["status"]
    simple = {name: node for name, node in spec["properties"].items() if name in _POD or not _fields(node)[0]}
    parts = [_INTRO, "\n## RLJob\n", job["description"], "\n\n", listed.list_fields("spec", spec, simple)]
    common = {name: node for name, node in spec["properties"]["head"]["properties"].items() if name in _COMMON}
    parts += ["\n### Every role\n", "`ROLE` is head, trainer, rollout, or an entry of rewards.\n\n"]
    parts.append(listed.list_fields("spec.ROLE", spec["properties"]["head"], common))
    for name, node in spec["properties"].items():
        if name not in simple:
            parts.append(_section(listed, name, node, name in spec.get("required", [])))
    parts += ["\n### status\n", _list_status(status)]
    parts += ["\n### What may not change\n", *_immutable(spec), _RULES]
    parts += ["\n### What a resume may change\n", _resume()]
    status = reward_model["properties"]["status"]
    parts += [
        f"\n## RewardModel\n{reward_model['description']} ",
        "Its `spec` has the fields of an entry of an RLJob's `spec.rewards`, except name, weight, failurePolicy, "
        f"deadlineSeconds and hedging, and of an RLJob's `spec` {', '.join(_POD[:-1])} and {_POD[-1]}.\n\n",
        "### status\n",
        _list_status(status),
        f"\n## RLJobPolicy\n{policy['description']} See [namespaces of several teams](tenants.md).\n\n",
        listed.list_fields("spec", policy["properties"]["spec"]),
    ]
    return "".join(parts)


class Listed:
    """The lists of a page, and their objects: a later object with fields of an earlier one names that one."""

    def __init__(self, effects: Effects) -> None:
        self._effects = effects
        self._objects = dict[str, Schema]()

    def list_fields(self, path: str, node: Schema, fields: dict[str, Schema] | None = None) -> str:
        fields = node["properties"] if fields is None else fields
        return "".join(self._lines(path, node, fields))

    def _lines(self, path: str, holder: Schema, fields: dict[str, Schema]) -> Iterator[str]:
        self._objects.setdefault(path, {**holder, "properties": fields})
        for name, node in fields.items():
            required = name in holder.get("required", [])
            inner, suffix = _fields(node)
            place, object_ = f"{path}.{name}{suffix}", node["items"] if suffix else node
            own, shared = self._share(place, object_) if inner else ({}, "")
            effect = self._effects.get(f"{path}.{name}".removeprefix("spec."), "")
            facts = ", ".join(filter(None, (_describe_type(node), _describe_default(node, required))))
            facts += f"; {effect}" if effect else ""
            description = node.get("description", "")
            if effect:  # which says the same
                description = _CHANGES.sub("", description)
            yield f"- `{path}.{name}` ({facts}): {description}{shared}\n"
            yield from self._lines(place, object_, own)

    def _share(self, path: str, holder: Schema) -> tuple[dict[str, Schema], str]:
        """Return the fields of an object that need lines of their own, and a sentence about the others."""
        left, texts = dict(holder["properties"]), list[str]()
        while found := max(self._find(path, holder, left), key=lambda each: len(each[1]), default=None):
            other, names, effect = found
            missing = [f"`{name}`" for name in self._objects[other]["properties"] if name not in names]
            if len(missing) > len(names):
                text = f"{', '.join(f'`{name}`' for name in names)} as in `{other}`"
            else:
                text = f"the fields of `{other}`" + (f", without {', '.join(missing)}" if missing else "")
            texts.append(text + (f"; on change: {effect}" if effect else ""))
            left = {name: field for name, field in left.items() if name not in names}
        self._objects.setdefault(path, holder)
        return left, "".join(f" Has {text}." for text in texts)

    def _find(self, path: str, holder: Schema, left: dict[str, Schema]) -> Iterator[tuple[str, list[str], str]]:
        """Yield objects listed before, the fields that they share with this one, and, where it is not as there, what
        a change of these does."""
        for other, known in self._objects.items():
            same = [
                name
                for name, field in left.items()
                if known["properties"].get(name) == field
                and (name in known.get("required", ())) == (name in holder.get("required", ()))
            ]
            effects = {name: self._effects_of(path, name, left[name]) for name in same}
            alike = [name for name in same if effects[name] == self._effects_of(other, name, left[name])]
            counts = Counter(each for found in effects.values() for each in found)
            effect = counts.most_common(1)[0][0] if counts else ""
            uniform = [name for name in same if set(effects[name]) == {effect}]
            names, text = (uniform, effect) if len(uniform) > len(alike) else (alike, "")
            if len(json.dumps([left[name] for name in names])) > _MIN_SHARED_CHARACTERS + 60 * len(names):
                yield other, names, text

    def _effects_of(self, path: str, name: str, node: Schema) -> list[str]:
        """What a change does, of a field, or of each field in it."""
        inner, suffix = _fields(node)
        path = f"{path}.{name}"
        if inner:
            return [each for key, field in inner.items() for each in self._effects_of(path + suffix, key, field)]
        return [self._effects.get(path.removeprefix("spec."), "")]


def _resume() -> str:
    fixed, recorded = (", ".join(f"`{path}`" for path in paths) for paths in (FIXED, RECORDED))
    return (
        "What a checkpoint is resumed with, here and on a cluster ([a changed job](lifecycle.md#a-changed-job)):\n\n"
        f"- Refused with another value: {fixed}.\n"
        f"- Allowed, printed, recorded with the step and on the run's page: {recorded}, but for fields above and "
        "those of Pods.\n"
        "- Allowed: all others.\n"
    )


def _section(listed: Listed, name: str, node: Schema, required: bool) -> str:
    fields, suffix = _fields(node)
    own = {key: value for key, value in fields.items() if name not in _ROLES or key not in _COMMON}
    text = f"\n### spec.{name}\n{node['description']}{' Required.' if required else ''}\n"
    if name in _ROLES:
        text += "The fields of [every role](#every-role) apply, too.\n"
    holder = node["items"] if suffix else node
    return text + ("\n" + listed.list_fields(f"spec.{name}{suffix}", holder, own) if own else "")


def _fields(node: Schema) -> tuple[dict[str, Schema], str]:
    """Return the fields of an object or of the objects of a list, and the suffix of its path."""
    if node.get("type") == "array":
        return node["items"].get("properties", {}), "[]"
    return node.get("properties", {}), ""


def _describe_default(node: Schema, required: bool) -> str:
    if required:
        return "required"
    if node.get("default") in ({}, None):
        return ""
    return f"default `{json.dumps(node['default'], ensure_ascii=False)}`"


def _describe_type(node: Schema) -> str:
    if node.get("x-kubernetes-int-or-string"):
        return "quantity"
    if "type" not in node:
        return "any value"
    if "enum" in node:
        return f"`{'|'.join(value for value in node['enum'] if value)}`"
    if node["type"] == "array":
        return f"list of {_describe_type(node['items'])}"
    if "additionalProperties" in node:
        return f"map of {_describe_type(node['additionalProperties'])}"
    if node.get("x-kubernetes-preserve-unknown-fields"):
        return "any fields"
    above, below = (">" if node.get("exclusiveMinimum") else ">="), ("<" if node.get("exclusiveMaximum") else "<=")
    bounds = [f" {above}{node['minimum']:.12g}"] if "minimum" in node else []
    bounds += [f" {below}{node['maximum']:.12g}"] if "maximum" in node else []
    return str(node["type"]) + "".join(bounds)


def _list_status(status: Schema) -> str:
    """The fields of a status, each with the names of those in it. `kubectl explain` has the rest."""
    lines = [f"{status['description']} `kubectl explain rljob.status --recursive` has the fields in each.\n\n"]
    for name, node in status["properties"].items():
        inner = ", ".join(f"`{field}`" for field in _fields(node)[0])
        description = node.get("description", "") + (f" It has {inner}." if inner else "")
        lines.append(f"- `status.{name}` ({_describe_type(node)}): {description}\n")
    return "".join(lines)


def _immutable(spec: Schema) -> Iterator[str]:
    rules = [rule["message"].partition(";")[0] for rule in spec["x-kubernetes-validations"]]
    for end, heading in (
        (" is immutable", "Immutable"),
        (" is immutable while the job runs", "Unless it is suspended"),
    ):
        yield f"- {heading}: {', '.join(f'`{rule.removesuffix(end)}`' for rule in rules if rule.endswith(end))}.\n"


_SCALARS = {bool: "true or false", int: "whole number", float: "number", str: "text"}


def build_step_table() -> str:
    """Return the values of a step, by the parts of its record."""
    numbers = list(list_numbers(StepRecord))
    groups = [(kind, [n for n in numbers if n.path in _own_fields(kind)]) for kind in reversed(StepRecord.__mro__)]
    for kind, path in ((SourceNumbers, "sources/"), (AgentNumbers, "agent/")):
        groups.append((kind, [number for number in numbers if number.path.startswith(path)]))
    rows = (row for kind, found in groups if found for row in (_head(kind), *_list_rows(found)))
    return "| value | unit | meaning |\n|---|---|---|\n" + "".join(rows)


def build_evaluation_table() -> str:
    """Return the values that an evaluation alone has."""
    own_fields = _own_fields(EvaluationNumbers) | _own_fields(EvaluationRecord)
    own = [number for number in list_numbers(EvaluationRecord) if number.path in own_fields]
    return "| value | unit | meaning |\n|---|---|---|\n" + "".join(_list_rows(own))


def build_column_table() -> str:
    """Return the columns of the trajectory log."""
    return "| column | type | content |\n|---|---|---|\n" + "".join(_list_columns(RecordedRow, ""))


def _own_fields(kind: type) -> set[str]:
    """Return the fields that a class defines, without those that it narrows."""
    inherited = {name for base in kind.__bases__ for name in getattr(base, "model_fields", {})}
    return set(vars(kind).get("__annotations__", {})) - inherited


def _head(kind: type) -> str:
    summary, _, _ = (inspect.getdoc(kind) or "").partition("\n\n")
    return f"| **{_escape(summary)}** | | |\n"


def _list_rows(numbers: list[Number]) -> Iterator[str]:
    for number in numbers:
        unit, path = find_mark(number.field, Unit), number.path.replace("*", number.label.upper())
        yield f"| `{path}` | {unit.name if unit else ''} | {_escape(number.field.description or '')} |\n"


def _list_columns(kind: type[Record], path: str) -> Iterator[str]:
    for name, field in kind.model_fields.items():
        part = find_part(field.annotation)
        yield f"| `{path}{name}` | {_describe_column(field)} | {_escape(field.description or '')} |\n"
        if part is not None:
            yield from _list_columns(part, f"{path}{name}[].")


def _describe_column(field: FieldInfo) -> str:
    if find_part(field.annotation) is not None:
        return "list"
    if get_origin(field.annotation) is dict:
        return "map of numbers"
    kinds: tuple[Any, ...] = (field.annotation, *get_args(field.annotation))
    if any(get_origin(kind) is list for kind in kinds):
        return "list of numbers"
    return next(_SCALARS[kind] for kind in kinds if kind in _SCALARS)


def _escape(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
