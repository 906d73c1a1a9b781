"""Build docs/reference.md: tables of all fields, from the schemas of the CRDs. Fields of all roles are listed once.

`dev/on_change.py` adds to each field what the operator does when it changes, and writes the page.

It also builds the tables of a run's records, from the docstrings of their types. Pure.
"""

import inspect
import json
from collections.abc import Iterator
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
rejected with the nearest known name. In the column default, `required` means that there is no default, and `null` that
the field may be left out; its meaning is then described. `rljob validate FILE` reports all errors of a file at once.

The column on change is what a change of the field does to a running job that trains, whose rollouts have Pods of their
own: which roles get new Pods (`its own`: the role that has the field). If head or trainer do, the run starts again from
its last checkpoint; without a claim or storage, at step 0. [A warning](lifecycle.md#what-replaces-pods) tells it.
`reloaded`: the driver reads the field again. `none`: the operator acts by the new value, and replaces no Pod.

Relative paths in a job file are relative to the job file, not to the working directory.
"""
_ROLES = ("head", "trainer", "rollout", "rewards")
_COMMON = tuple(yaml_fields(Role))
_POD = tuple(yaml_fields(PodSettings))
_TABLE = "| field | type | default | meaning |\n|---|---|---|---|\n"


def build_reference(job: Schema, reward_model: Schema, policy: Schema) -> str:
    spec, status = job["properties"]["spec"], job["properties"]["status"]
    simple = {name: node for name, node in spec["properties"].items() if name in _POD or not _fields(node)[0]}
    parts = [_INTRO, "\n## RLJob\n", job["description"], "\n\n", _table("spec", spec, simple)]
    for name, node in spec["properties"].items():
        if name not in simple:
            parts.append(_section(name, node, name in spec.get("required", [])))
    common = {name: node for name, node in spec["properties"]["head"]["properties"].items() if name in _COMMON}
    parts += ["\n### Every role\n", "`ROLE` is head, trainer, rollout, or an entry of rewards.\n\n"]
    parts.append(_table("spec.ROLE", spec["properties"]["head"], common))
    parts += ["\n### status\n", f"{status['description']}\n\n", _table("status", status)]
    parts += ["\n### Rules across fields\n", *_rules(spec, "spec", seen=set())]
    parts += ["\n### What a resume may change\n", _resume()]
    status = reward_model["properties"]["status"]
    parts += [
        f"\n## RewardModel\n{reward_model['description']} ",
        "Its `spec` has the fields of an entry of an RLJob's `spec.rewards`, except name, weight, failurePolicy, "
        f"deadlineSeconds and hedging, and of an RLJob's `spec` {', '.join(_POD[:-1])} and {_POD[-1]}.\n\n",
        f"### status\n{status['description']}\n\n",
        _table("status", status),
        f"\n## RLJobPolicy\n{policy['description']} See [namespaces of several teams](tenants.md).\n\n",
        _table("spec", policy["properties"]["spec"]),
    ]
    return "".join(parts)


def _resume() -> str:
    fixed, recorded = (", ".join(f"`{path}`" for path in paths) for paths in (FIXED, RECORDED))
    return (
        "What a checkpoint is resumed with, here and on a cluster ([a changed job](lifecycle.md#a-changed-job)):\n\n"
        f"- Refused with another value: {fixed}.\n"
        f"- Allowed, printed, recorded with the step and on the run's page: {recorded}, but for fields above and "
        "those of Pods.\n"
        "- Allowed: all others.\n"
    )


def _section(name: str, node: Schema, required: bool) -> str:
    fields, suffix = _fields(node)
    own = {key: value for key, value in fields.items() if name not in _ROLES or key not in _COMMON}
    text = f"\n### spec.{name}\n{node['description']}{' Required.' if required else ''}\n"
    if name in _ROLES:
        text += "The fields of [every role](#every-role) apply, too.\n"
    holder = node["items"] if suffix else node
    return text + ("\n" + _table(f"spec.{name}{suffix}", holder, own) if own else "")


def _fields(node: Schema) -> tuple[dict[str, Schema], str]:
    """Return the fields of an object or of the objects of a list, and the suffix of its path."""
    if node.get("type") == "array":
        return node["items"].get("properties", {}), "[]"
    return node.get("properties", {}), ""


def _table(path: str, node: Schema, fields: dict[str, Schema] | None = None) -> str:
    return _TABLE + "".join(_rows(path, node, fields if fields is not None else node["properties"]))


def _rows(path: str, holder: Schema, fields: dict[str, Schema]) -> Iterator[str]:
    for name, node in fields.items():
        required = name in holder.get("required", [])
        description = node.get("description", "").replace("|", "\\|")
        yield f"| `{path}.{name}` | {_describe_type(node)} | {_describe_default(node, required)} | {description} |\n"
        inner, suffix = _fields(node)
        if inner:
            yield from _rows(f"{path}.{name}{suffix}", node["items"] if suffix else node, inner)


def _describe_default(node: Schema, required: bool) -> str:
    if required:
        return "required"
    if node.get("default") == {} or "default" not in node:
        return "null" if node.get("nullable") else ""
    return f"`{json.dumps(node['default'], ensure_ascii=False)}`"


def _describe_type(node: Schema) -> str:
    if node.get("x-kubernetes-int-or-string"):
        return "quantity"
    if "type" not in node:
        return "any value"
    if "enum" in node:
        return ", ".join(f"`{value}`" for value in node["enum"] if value != "")
    if node["type"] == "array":
        return f"list of {_describe_type(node['items'])}"
    if "additionalProperties" in node:
        return f"map of {_describe_type(node['additionalProperties'])}"
    if node.get("x-kubernetes-preserve-unknown-fields"):
        return "any fields"
    names = {"object": "object", "string": "text", "boolean": "true or false", "integer": "whole number"}
    above, below = (">" if node.get("exclusiveMinimum") else ">="), ("<" if node.get("exclusiveMaximum") else "<=")
    bounds = [f" {above} {node['minimum']:.12g}"] if "minimum" in node else []
    bounds += [f" {below} {node['maximum']:.12g}"] if "maximum" in node else []
    return names.get(node["type"], "number") + ",".join(bounds)


def _rules(node: Schema, path: str, seen: set[str]) -> Iterator[str]:
    for rule in node.get("x-kubernetes-validations", []):
        if rule["message"] not in seen:
            seen.add(rule["message"])
            yield f"- `{path}`: {rule['message']}.\n"
    for name, inner in node.get("properties", {}).items():
        yield from _rules(inner, f"{path}.{name}", seen)
    if "items" in node:
        yield from _rules(node["items"], f"{path}[]", seen)


_NO_GAUGE = ("type", "step", "time", "prompts", "prompt_sources", "set", "weight_digest")
_SCALARS = {bool: "true or false", int: "whole number", float: "number", str: "text"}


def build_step_table() -> str:
    """Return the values of a step, by the parts of its record."""
    numbers = list(list_numbers(StepRecord))
    groups = [(kind, [n for n in numbers if n.path in _own_fields(kind)]) for kind in reversed(StepRecord.__mro__)]
    for kind, path in ((SourceNumbers, "sources/"), (AgentNumbers, "agent/")):
        groups.append((kind, [number for number in numbers if number.path.startswith(path)]))
    rows = (row for kind, found in groups if found for row in (_head(kind), *_list_rows("step", found)))
    return "| value | unit | meaning | gauge |\n|---|---|---|---|\n" + "".join(rows)


def build_evaluation_table() -> str:
    """Return the values that an evaluation alone has."""
    own_fields = _own_fields(EvaluationNumbers) | _own_fields(EvaluationRecord)
    own = [number for number in list_numbers(EvaluationRecord) if number.path in own_fields]
    return "| value | unit | meaning | gauge |\n|---|---|---|---|\n" + "".join(_list_rows("eval", own))


def build_column_table() -> str:
    """Return the columns of the trajectory log."""
    return "| column | type | content |\n|---|---|---|\n" + "".join(_list_columns(RecordedRow, ""))


def _own_fields(kind: type) -> set[str]:
    """Return the fields that a class defines, without those that it narrows."""
    inherited = {name for base in kind.__bases__ for name in getattr(base, "model_fields", {})}
    return set(vars(kind).get("__annotations__", {})) - inherited


def _head(kind: type) -> str:
    summary, _, _ = (inspect.getdoc(kind) or "").partition("\n\n")
    return f"| **{_escape(summary)}** | | | |\n"


def _list_rows(kind: str, numbers: list[Number]) -> Iterator[str]:
    for number in numbers:
        labels = ["set", number.label] if kind == "eval" else [number.label]
        unit, label = find_mark(number.field, Unit), f"{{{', '.join(filter(None, labels))}}}" if any(labels) else ""
        gauge = "" if number.path in _NO_GAUGE else f"`rljob_{kind}_{number.metric}{label}`"
        path, meaning = number.path.replace("*", number.label.upper()), _escape(number.field.description or "")
        yield f"| `{path}` | {unit.name if unit else ''} | {meaning} | {gauge} |\n"


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
