"""Keep a CRD short enough for `kubectl apply`, which stores the whole manifest in an annotation. Pure.

A structural schema has no references: a type that ten fields have is ten times in it. Invariant: each description is
whole once, where it comes first, and elsewhere its first sentence; of the values of a list or a map, a description of
one sentence is left out elsewhere. docs/reference.md is complete.
"""

import json
import re
from typing import Any

Schema = dict[str, Any]

ANNOTATION_LIMIT_BYTES = 256 * 1024
"""The API server's limit of all annotations of an object."""
_FIRST_SENTENCE = re.compile(r".+?\.(?=\s+[A-Z`])")


def shorten_repeated(node: Schema, seen: set[str] | None = None) -> Schema:
    """Return the schema with repeated descriptions shortened. `seen` is of one schema."""
    seen = set() if seen is None else seen
    result = dict(node)
    if "description" in node:
        result["description"] = _shorten(node["description"], seen)
    if "properties" in node:
        result["properties"] = {name: shorten_repeated(field, seen) for name, field in node["properties"].items()}
    result |= {key: _shorten_values(node[key], seen) for key in ("items", "additionalProperties") if key in node}
    return result


def _shorten_values(node: Schema, seen: set[str]) -> Schema:
    """The same for the values of a list or a map, whose field has a description of its own."""
    description = node.get("description")
    is_known = description is not None and description in seen and not _FIRST_SENTENCE.match(description)
    return shorten_repeated({k: v for k, v in node.items() if not (is_known and k == "description")}, seen)


def _shorten(description: str, seen: set[str]) -> str:
    if description not in seen:
        seen.add(description)
        return description
    first = _FIRST_SENTENCE.match(description)
    return first[0] if first else description


def measure_annotation(crd: Schema) -> int:
    """Return the bytes of a manifest in the annotation: compact JSON, in which Go escapes three characters."""
    text = json.dumps(crd, separators=(",", ":"), ensure_ascii=False)
    return len(re.sub("[<>&]", r"\\u0000", text).encode())
