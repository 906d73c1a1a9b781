"""Write the schema of Pod templates: `python -m dev.pod_template [--check]`.

kubernetes-validate has the schemas of all versions of Kubernetes, 108 MB. The checks of Pod templates need what
PodTemplateSpec refers to in the newest, without descriptions and what all types have: 39 KB, which the package
rljob-core has as a file.
"""

from __future__ import annotations

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rljob_api.generate.__main__ import write_files
from rljob_core.pod_checks.schema import FILE, KUBERNETES_VERSION, ROOT_TYPE

_SOURCE = f"kubernetes-json-schema/v{KUBERNETES_VERSION}.0-local-strict/_definitions.json"
_REFERENCE = re.compile(r'"#/\$defs/([\w.-]+)"')
_UNUSED = ("description", "x-kubernetes-")
"""Beginnings of the keys of a schema that no check reads."""


def render() -> str:
    """Return the file: the definitions that PodTemplateSpec refers to, one in a line."""
    package = find_spec("kubernetes_validate")
    assert package is not None
    assert package.origin is not None
    definitions = json.loads((Path(package.origin).parent / _SOURCE).read_text())["$defs"]
    selected = sorted(select(definitions, ROOT_TYPE).items())
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(each, sort_keys=True)}" for name, each in selected)
    return f"{{\n{lines}\n}}\n"


def select(definitions: dict[str, Any], root: str) -> dict[str, Any]:
    """Return `root` and all to which it refers, also indirectly, without what no check reads. Pure."""
    selected: dict[str, Any] = {}
    names = [root]
    while names:
        if (name := names.pop()) not in selected:
            selected[name] = _strip(definitions[name])
            names += _REFERENCE.findall(json.dumps(selected[name]))
    return selected


def _strip(schema: Any, *, is_required: bool = False) -> Any:
    """Return a schema without its texts, and without what `rljob_core.pod_checks.schema` adds. Quantities are a text or
    a number, and either may be null, so `oneOf` becomes `anyOf`. A field may be called description."""
    if isinstance(schema, list):
        return [_strip(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    stripped = {
        "anyOf" if key == "oneOf" else key: _strip(value)
        for key, value in schema.items()
        if not key.startswith(_UNUSED) and key not in ("properties", "type") and value is not False
    }
    if fields := schema.get("properties"):
        required = schema.get("required", ())
        stripped["properties"] = {name: _strip(each, is_required=name in required) for name, each in fields.items()}
    if kind := schema.get("type"):
        assert isinstance(kind, str) == is_required, f"{schema}: only a required field must not be null"
        stripped["type"] = kind if is_required else kind[0]
    return stripped


def main(arguments: list[str]) -> int:
    return write_files({FILE: render()}, check="--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
