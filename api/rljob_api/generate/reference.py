"""docs/reference.md: every field of every kind in tables, from the schemas that the CRDs carry.

Pure text out of schemas; crd writes the file. Invariant: what roles have in common is told once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rljob_api.manifest.roles import Role

Schema = dict[str, Any]

_INTRO = """<!-- Generated from api/rljob_api by `make generate`. Edits go there. -->
# Reference

Every field of `RLJob` and `RewardModel` (`rljob.dev/v1alpha1`). Names are camelCase; a field that is not here is
refused, with the nearest known name. `required` stands where there is no default; `null` means that leaving the field
out is a choice of its own. `rljob validate FILE` tells everything that is wrong with a file at once.

A path in a job file that is relative starts at the job file, not at the working directory.
"""
_ROLES = ("head", "trainer", "rollout", "rewards")
_COMMON = tuple(field.alias or name for name, field in Role.model_fields.items())
_TABLE = "| field | type | default | meaning |\n|---|---|---|---|\n"


def build_reference(schemas: dict[str, Schema]) -> str:
    """The whole page."""
    job, reward_model = schemas["RLJob"]["properties"], schemas["RewardModel"]["properties"]
    spec = job["spec"]
    simple = {name: node for name, node in spec["properties"].items() if not _fields(node)[0]}
    parts = [_INTRO, "\n## RLJob\n", schemas["RLJob"]["description"], "\n\n", _table("spec", spec, simple)]
    for name, node in spec["properties"].items():
        if name not in simple:
            parts.append(_section(name, node, name in spec.get("required", [])))
    common = {name: node for name, node in spec["properties"]["head"]["properties"].items() if name in _COMMON}
    parts += ["\n### Every role\n", "`ROLE` is head, trainer, rollout, or an entry of rewards.\n\n"]
    parts.append(_table("spec.ROLE", spec["properties"]["head"], common))
    parts += ["\n### status\n", f"{job['status']['description']}\n\n", _table("status", job["status"])]
    parts += ["\n### What must hold across fields\n", *_rules(spec, "spec", seen=set())]
    parts += [
        "\n## RewardModel\n",
        f"{schemas['RewardModel']['description']} ",
        "Its `spec` has the fields of an entry of an RLJob's `spec.rewards`, save name, weight, failurePolicy, "
        "deadlineSeconds and hedging.\n\n",
        "### status\n",
        f"{reward_model['status']['description']}\n\n",
        _table("status", reward_model["status"]),
    ]
    return "".join(parts)


def _section(name: str, node: Schema, required: bool) -> str:
    fields, suffix = _fields(node)
    own = {key: value for key, value in fields.items() if name not in _ROLES or key not in _COMMON}
    text = f"\n### spec.{name}\n{node['description']}{' Required.' if required else ''}\n"
    if name in _ROLES:
        text += "The fields of [every role](#every-role) belong here, too.\n"
    holder = node["items"] if suffix else node
    return text + ("\n" + _table(f"spec.{name}{suffix}", holder, own) if own else "")


def _fields(node: Schema) -> tuple[dict[str, Schema], str]:
    """The fields of an object, or of a list's objects; and what its path gets."""
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
    if "enum" in node:
        return ", ".join(f"`{value}`" for value in node["enum"] if value != "")
    if node["type"] == "array":
        return f"list of {_describe_type(node['items'])}"
    if "additionalProperties" in node:
        return f"map of {_describe_type(node['additionalProperties'])}"
    if node.get("x-kubernetes-preserve-unknown-fields"):
        return "any fields"
    return {"object": "object", "string": "text", "boolean": "true or false"}.get(node["type"]) or _describe_number(
        node
    )


def _describe_number(node: Schema) -> str:
    text = "whole number" if node["type"] == "integer" else "number"
    if "minimum" in node:
        text += f" {'>' if node.get('exclusiveMinimum') else '>='} {node['minimum']:.12g}"
    if "maximum" in node:
        text += (
            f"{',' if 'minimum' in node else ''} {'<' if node.get('exclusiveMaximum') else '<='} {node['maximum']:.12g}"
        )
    return text


def _rules(node: Schema, path: str, seen: set[str]) -> Iterator[str]:
    for rule in node.get("x-kubernetes-validations", []):
        if rule["message"] not in seen:
            seen.add(rule["message"])
            yield f"- `{path}`: {rule['message']}.\n"
    for name, inner in node.get("properties", {}).items():
        yield from _rules(inner, f"{path}.{name}", seen)
    if "items" in node:
        yield from _rules(node["items"], f"{path}[]", seen)
