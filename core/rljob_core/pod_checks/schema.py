"""Types and names of the fields of a Pod template, by Kubernetes' own schema.

The schema is of a version newer than most clusters: fields that a cluster does not have yet are left to its API
server. dev/pod_template.py writes its file. A template takes about 0.02 ms.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from rljob_api.phrases import did_you_mean
from rljob_api.read.documents import Location
from rljob_api.read.validation_messages import format_value

KUBERNETES_VERSION = "1.37"
FILE = Path(__file__).with_name("pod_template.json")
"""The definitions of ROOT_TYPE and of all to which it refers, by name, without what `_complete` adds."""
ROOT_TYPE = "io.k8s.api.core.v1.PodTemplateSpec"
_TYPES = {
    "string": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "object": "a mapping (name: value)",
    "array": "a list (lines that begin with '-')",
}
_INT32 = range(-(2**31), 2**31)
_MAX_LISTED = 12

Violation = tuple[Location, str]
"""The location in the template, and what is wrong there: a predicate to its path."""


@cache
def load_definitions() -> dict[str, Any]:
    """Return the JSON schema of each type of Kubernetes, by name."""
    definitions: dict[str, Any] = json.loads(FILE.read_text())
    return definitions


@cache
def _load() -> Any:
    import jsonschema_rs  # most commands of the CLI check no template

    definitions = {name: _complete(schema) for name, schema in load_definitions().items()}
    return jsonschema_rs.Draft202012Validator({"$ref": f"#/$defs/{ROOT_TYPE}", "$defs": definitions})


def _complete(schema: dict[str, Any], *, is_required: bool = False) -> dict[str, Any]:
    """Return the schema with what holds for all: only a required field must not be null, an object has no other fields
    than those that are named, and an int32 has its bounds."""
    completed, required = dict(schema), schema.get("required", ())
    if "properties" in schema:
        named = schema["properties"].items()
        completed["properties"] = {name: _complete(each, is_required=name in required) for name, each in named}
        completed["additionalProperties"] = False
    completed |= {key: _complete(schema[key]) for key in ("items", "additionalProperties") if key in schema}
    if "anyOf" in schema:
        completed["anyOf"] = [_complete(each) for each in schema["anyOf"]]
    if "type" in schema and not is_required:
        completed["type"] = [schema["type"], "null"]
    if schema.get("format") == "int32":
        completed |= {"minimum": _INT32.start, "maximum": _INT32.stop - 1}
    return completed


def find_type_violations(template: Any) -> Iterator[Violation]:
    """Yield wrong types, unknown fields and missing ones."""
    for error in _load().iter_errors(template):
        yield from _KINDS.get(error.kind.name, _describe_type)(error, tuple(error.instance_path))


def _describe_type(error: Any, location: Location) -> Iterator[Violation]:
    alternatives = [error, *(inner for inners in getattr(error.kind, "context", ()) for inner in inners)]
    expected = {kind for each in alternatives for kind in getattr(each.kind, "types", ())}
    expected_text = " or ".join(_TYPES[kind] for kind in _TYPES if kind in expected) or "valid"
    hint = "; put it in quotes" if "string" in expected and isinstance(error.instance, bool | int | float) else ""
    yield location, f"must be {expected_text}, got {format_value(error.instance)}{hint}"


def describe_unknown_field(path: str) -> str:
    """Return what is wrong with the name of a template's field, `spec.NAME` or `metadata.NAME`; empty if it exists."""
    part, _, name = path.partition(".")
    definitions = load_definitions()
    reference = definitions[ROOT_TYPE]["properties"][part]["$ref"]
    known = definitions[reference.rpartition("/")[2]]["properties"]
    return "" if name in known else _describe_name(name, list(known))


def _describe_name(name: str, known: list[str]) -> str:
    listed = f"known fields are {', '.join(known[:_MAX_LISTED])}{', ...' if len(known) > _MAX_LISTED else ''}"
    return f"is unknown in Kubernetes {KUBERNETES_VERSION}; {did_you_mean(name, known, listed)}"


def _describe_unknown(error: Any, location: Location) -> Iterator[Violation]:
    # The path of the schema is `$defs`, the type's name, `additionalProperties`.
    known = list(load_definitions()[error.schema_path[1]].get("properties", {}))
    for name in error.kind.unexpected:
        yield (*location, name), _describe_name(str(name), known)


def _describe_missing(error: Any, location: Location) -> Iterator[Violation]:
    yield (*location, error.kind.property), "is required"


def _describe_bound(error: Any, location: Location) -> Iterator[Violation]:
    bound = "most" if error.kind.name == "maximum" else "least"
    yield location, f"must be at {bound} {error.kind.limit}, got {error.instance}"


_KINDS = {
    "additionalProperties": _describe_unknown,
    "required": _describe_missing,
    "minimum": _describe_bound,
    "maximum": _describe_bound,
}
