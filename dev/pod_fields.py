"""Write the fields of Pod templates for the chart's policy: `python -m dev.pod_fields [--check]`.

The source is the schema that rljob_core checks templates with, so that the API server refuses what the operator would
report. A kind is one letter of `_KINDS`, or the name of a type; `[` before it means a list, `{` a mapping.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rljob_api.generate.__main__ import write_files
from rljob_core.pod_checks.schema import KUBERNETES_VERSION, ROOT_TYPE, load_definitions

FILE = Path(__file__).resolve().parents[1] / "charts/rljob/files/pod_fields.json"
_KINDS = {"string": "s", "integer": "i", "number": "n", "boolean": "b"}
_QUANTITY, _PORT, _ANY = "q", "p", "o"
_SCALARS = {"Quantity": _QUANTITY, "IntOrString": _PORT, "Time": "s", "FieldsV1": _ANY}
_PREFIX = "#/$defs/"
_CEL_TYPES = {"s": ("string",), "i": ("int",), "n": ("int", "double"), "b": ("bool",), "q": ("string", "int", "double")}
_CEL_TYPES |= {"p": ("string", "int"), "[": ("list",)}

Definitions = Mapping[str, Mapping[str, Any]]


def build_table(definitions: Definitions, root: str) -> dict[str, dict[str, str]]:
    """Return type -> field -> kind of all types below `root`. Types have the last part of their name."""
    table: dict[str, dict[str, str]] = {}
    waiting = [root]
    while waiting:
        name = waiting.pop()
        if _short(name) in table:
            continue
        properties = definitions[name]["properties"]
        table[_short(name)] = {field: _find_kind(schema) for field, schema in properties.items()}
        waiting += [found for schema in properties.values() for found in _find_types(schema)]
    return dict(sorted(table.items()))


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def _find_kind(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = _short(schema["$ref"])
        return _SCALARS.get(name, name)
    kind = schema["type"]
    if kind == "array":
        return f"[{_find_kind(schema['items'])}"
    if kind == "object":
        inner = schema.get("additionalProperties")
        return f"{{{_find_kind(inner)}" if isinstance(inner, Mapping) else _ANY
    return _KINDS[kind]


def _find_types(schema: Mapping[str, Any]) -> Iterator[str]:
    if "$ref" in schema and _short(schema["$ref"]) not in _SCALARS:
        yield schema["$ref"].removeprefix(_PREFIX)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), Mapping):
            yield from _find_types(schema[key])


def find_cel_types(table: Mapping[str, Mapping[str, str]]) -> dict[str, tuple[str, ...]]:
    """Return the types in CEL of the values of each kind in the table, and of each entry of its lists and mappings."""
    kinds = {kind for fields in table.values() for kind in fields.values()}
    kinds |= {kind[1:] for kind in kinds if kind[0] in "[{"}
    return {kind: _CEL_TYPES.get(kind, _CEL_TYPES.get(kind[0], ("map",))) for kind in sorted(kinds)}


def count_levels(table: Mapping[str, Mapping[str, str]], name: str) -> int:
    """Return the number of types on the longest way from a type to a field, itself included."""
    inner = {kind.lstrip("[{") for kind in table[name].values()} & set(table)
    return 1 + max((count_levels(table, each) for each in inner), default=0)


def render() -> str:
    definitions = load_definitions()
    table, root = build_table(definitions, ROOT_TYPE), _short(ROOT_TYPE)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(fields)}" for name, fields in table.items())
    head: dict[str, Any] = {"version": KUBERNETES_VERSION, "root": root, "levels": count_levels(table, root)}
    return f'{json.dumps(head)[:-1]},\n"kinds": {json.dumps(find_cel_types(table))},\n"types": {{\n{lines}\n}}}}\n'


def main(arguments: list[str]) -> int:
    return write_files({FILE: render()}, check="--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
