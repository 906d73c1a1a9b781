"""Write docs/reference.md, and which fields start a run again: `python -m dev.on_change [--check]`.

What a change of a field does to a running job is found with the operator's own code: a job gets two values, and
the workloads of both are compared as a reconcile compares them. The chart warns of a change of the fields in `FILE`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from dev.folders import ROOT
from rljob_api.generate.__main__ import write_files
from rljob_api.generate.crd import KINDS, build_object_schema
from rljob_api.generate.reference import build_reference
from rljob_api.manifest.base import DEFER_RULES
from rljob_api.manifest.immutable_fields import IMMUTABLE
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.schedule import MUTABLE_SCHEDULE_FIELDS
from rljob_api.wire.contract import LABEL_ROLE
from rljob_core.backend import ChildKey, Manifest, key_of
from rljob_core.children import WORKLOAD_KINDS, build_children, keep
from rljob_core.defaults import DEFAULTS

FILE = "charts/rljob/files/restarting_fields.json"
_ROLES = ("head", "trainer", "rollout", "reward", "agent")
_RESTARTING = re.compile("head|trainer|all$|refused")
"""Effects that start a run again, or that a change cannot have."""
_JOB = """{"metadata": {"name": "a"}, "spec": {
  "model": {"source": "/a"}, "data": {"train": {"source": "/a"}},
  "rewards": [{"name": "a", "function": {"inline": "a"}}]
}}"""
_AGENTS = """[
  {"type": "program", "user": {"function": {"inline": "a"}}, "runner": {"function": {"inline": "a"}}},
  {"type": "environment"}, {"type": "program"}
]"""
"""What the job has as its agent: the first with which a change has an effect."""
_VALUES = """{
  "source": ["/a", "/b"], "url": ["http://a", "http://b"], "endpoint": ["http://a", "http://b"],
  "storage": ["s3://a", "s3://b"], "gpuResource": ["a/a", "b/a"], "metric": ["accuracy", "majority"],
  "export": ["last", "best"], "columns": [{"a": "step"}, {"b": "step"}], "headers": [{}, {"a": "a"}],
  "custom": ["a:a", "b:b"]
}"""
"""Two values of fields whose type does not suffice."""

Schema = dict[str, Any]
Path = tuple[str, ...]


def find_fields(node: Schema, path: Path = ()) -> Iterator[Path]:
    """Yield the path of each field that has no fields, such as ("rewards[]", "weight")."""
    for name, field in node["properties"].items():
        if "properties" in (inner := field.get("items", field)):
            yield from find_fields(inner, (*path, name if inner is field else f"{name}[]"))
        else:
            yield (*path, name)


def find_effect(schema: Schema, path: Path) -> str:
    """Return what a change of a field does to a running job. `schema`: that of spec."""
    for rule in IMMUTABLE:
        if ".".join((*path, "")).startswith(f"{rule.field}.") and re.match("is immutable(;| while)", rule.message):
            return "refused while it runs" if "while" in rule.message else "refused"
    if path[-1] == "placement":  # a rule about the list
        return "refused while it runs"
    if path == ("suspend",):
        return "all are deleted"
    if path[0] == "schedule" and path[1] in MUTABLE_SCHEDULE_FIELDS:
        return "reloaded"
    for agent in range(3):
        old, new = (_build_workloads(schema, path, agent, index) for index in (0, 1))
        unchanged = keep.find_unchanged(new, old)
        replaced = {new[key]["metadata"]["labels"][LABEL_ROLE] for key in new.keys() - unchanged}
        if replaced:
            return "all" if len(replaced) == len(_ROLES) else ", ".join(role for role in _ROLES if role in replaced)
        before, after = (
            [each["metadata"]["annotations"][keep.ANNOTATION_CONFIGURATION] for each in workloads.values()]
            for workloads in (old, new)
        )
        if before != after:  # it is read, and no part of what is read at the start
            return "reloaded"
    return "none"


def _build_workloads(schema: Schema, path: Path, agent: int, index: int) -> dict[ChildKey, Manifest]:
    """The workloads of a job with one of the two values of a field, and with all that the field is in."""
    job, node = json.loads(_JOB), schema
    holder = job["spec"]
    holder["agent"] = json.loads(_AGENTS)[agent]
    for name in path[:-1]:
        field = name.removesuffix("[]")
        node = node["properties"][field]
        if field == name:
            holder = holder.setdefault(field, _choose(node, field, 0))
        else:
            node = node["items"]
            holder = holder.setdefault(field, [_choose(node, field, 0)])[0]
    holder[path[-1]] = _choose(node["properties"][path[-1]], path[-1], index)
    children = build_children(RLJob.model_validate(job, context=DEFER_RULES), "a", DEFAULTS)
    return {key_of(child): child for child in children if child["kind"] in WORKLOAD_KINDS}


def _choose(node: Schema, name: str, index: int) -> Any:
    """One of two values; of an object, one with what it must have."""
    if "properties" in node:
        return {each: _choose(node["properties"][each], each, 0) for each in node.get("required", ())}
    if choices := json.loads(_VALUES).get(name, node.get("enum")):
        return choices[min(index, len(choices) - 1)]
    if inner := node.get("additionalProperties"):
        return {"a": _choose(inner, name, index)}
    if "items" in node:
        return [_choose(node["items"], name, index)] * (index + 1)
    if "type" not in node:  # a quantity
        return f"{index + 1}Gi"
    number = node.get("minimum", 0) + (index + 1) / (8 if node["type"] == "number" else 1)
    values = {"string": "ab"[index], "boolean": index == 1, "object": {"metadata": {"labels": {"a": "ab"[index]}}}}
    return values.get(node["type"], number)


def find_restarting(effects: Mapping[Path, str]) -> dict[str, str]:
    """Return from what has fields, such as rewards[], to those that start the run again, or consist of such fields.
    Fields that may not change are in it: no such change is admitted."""
    mixed = {
        path[:end] for path, effect in effects.items() for end in range(len(path) + 1) if not _RESTARTING.match(effect)
    }
    found = dict[str, dict[str, None]]()
    for path in effects:
        if path not in mixed:
            *holders, field = next(path[:end] for end in range(len(path) + 1) if path[:end] not in mixed)
            found.setdefault(".".join(holders), {})[field.removesuffix("[]")] = None
    return {holder: " ".join(fields) for holder, fields in found.items()}


def name_effects(effects: Mapping[Path, str]) -> dict[str, str]:
    """Return the effects by path. Those of all roles are the head's; a service's role is called own."""
    cells = {".".join(path): effect for path, effect in effects.items()}
    for start, role in (("rewards[].", "reward"), ("agent.", "agent")):
        cells |= {path: effect.replace(role, "own") for path, effect in cells.items() if path.startswith(start)}
    roles = {path: effect.replace("head", "own") for path, effect in cells.items() if path.startswith("head.")}
    return cells | {f"ROLE{path[4:]}": effect for path, effect in roles.items()}


def main(arguments: list[str]) -> int:
    schemas = [build_object_schema(kind) for kind in KINDS]
    spec = schemas[0]["properties"]["spec"]
    effects = {path: find_effect(spec, path) for path in find_fields(spec)}
    files = {
        ROOT / "docs/reference.md": build_reference(*schemas, name_effects(effects)),
        ROOT / FILE: json.dumps(find_restarting(effects), indent=1) + "\n",
    }
    return write_files(files, check="--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
