"""Types and names of the fields of a Pod template, by Kubernetes' own schema.

The schema is of a version newer than most clusters: fields that a cluster does not have yet are left to its API
server. dev/pod_template.py writes its file. A template takes about 1 ms.
"""

import difflib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from rljob_api.read.documents import Location
from rljob_api.read.validation_messages import format_value

KUBERNETES_VERSION = "1.37"
FILE = Path(__file__).with_name("pod_template.json")
"""The definitions of ROOT_TYPE and of all to which it refers, by name."""
ROOT_TYPE = "io.k8s.api.core.v1.PodTemplateSpec"
_TYPES = {
    "string": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "object": "a mapping (name: value)",
    "array": "a list (lines that begin with '-')",
}
_INT32_MAX = 2**31 - 1
_MAX_LISTED = 12

Violation = tuple[Location, str]
"""The location in the template, and what is wrong there: a predicate to its path."""


def load_definitions() -> dict[str, Any]:
    """Return the JSON schema of each type of Kubernetes, by name."""
    definitions: dict[str, Any] = json.loads(FILE.read_text())
    return definitions


@cache
def _load() -> Any:
    import jsonschema  # slow to import

    # A quantity is text or a number, and either may be null: null must not be "more than one of".
    any_of = jsonschema.Draft202012Validator.VALIDATORS["anyOf"]
    kind = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"oneOf": any_of, "format": _check_format})
    return kind({"$ref": f"#/$defs/{ROOT_TYPE}", "$defs": load_definitions()})


def _check_format(validator: Any, name: str, value: Any, schema: Any) -> Iterator[Any]:
    from jsonschema import ValidationError

    if name == "int32" and type(value) is int and not -_INT32_MAX <= value <= _INT32_MAX:
        yield ValidationError(f"must be at most {_INT32_MAX}, got {value}")


def find_type_violations(template: Any) -> Iterator[Violation]:
    """Yield wrong types, unknown fields and missing ones."""
    for error in _load().iter_errors(template):
        location = tuple(error.absolute_path)
        yield from _KINDS.get(error.validator, _describe_type)(error, location)


def _describe_type(error: Any, location: Location) -> Iterator[Violation]:
    alternatives = [error.schema] if "type" in error.schema else error.schema.get("oneOf", [])
    expected = {
        kind for schema in alternatives for kind in ([schema["type"]], schema["type"])[type(schema["type"]) is list]
    }
    expected_text = " or ".join(_TYPES[kind] for kind in _TYPES if kind in expected) or "valid"
    hint = "; put it in quotes" if "string" in expected and isinstance(error.instance, bool | int | float) else ""
    yield location, f"must be {expected_text}, got {format_value(error.instance)}{hint}"


def _describe_unknown(error: Any, location: Location) -> Iterator[Violation]:
    known = list(error.schema.get("properties", {}))
    for name in error.instance:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            listed = f"known fields are {', '.join(known[:_MAX_LISTED])}{', ...' if len(known) > _MAX_LISTED else ''}"
            hint = f"did you mean {near[0]}?" if near else listed
            yield (*location, name), f"is unknown in Kubernetes {KUBERNETES_VERSION}; {hint}"


def _describe_missing(error: Any, location: Location) -> Iterator[Violation]:
    yield from (((*location, name), "is required") for name in error.validator_value if name not in error.instance)


def _describe_format(error: Any, location: Location) -> Iterator[Violation]:
    yield location, error.message


_KINDS = {"additionalProperties": _describe_unknown, "required": _describe_missing, "format": _describe_format}
