"""CRDs of a neighbouring minor version: which fields only they have, or only the operator's types. Pure.

`crds` decides whether the operator may start with them. Of a newer CRD, fields that are set are problems of the
object: an API server stores no defaults. Of an older CRD, what its status lacks is not
written. Invariant: no set field is ignored silently, and no reconcile writes a status again that the API server cuts.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rljob_api import __version__
from rljob_api.manifest.base import PRESERVE
from rljob_core.backend import Manifest, OwnerStatus

Schema = dict[str, Any]
_MINOR = re.compile(r"^(\d+)\.(\d+)\.\d+")


def count_minors(version: str, own: str = __version__) -> int | None:
    """Return by how many minor versions `version` is newer; None for another major version, or an unknown one."""
    found, mine = _MINOR.match(version), _MINOR.match(own)
    if found is None or mine is None or found[1] != mine[1]:
        return None
    return int(found[2]) - int(mine[2])


def find_missing_fields(expected: Schema, found: Schema) -> list[str]:
    """Return the paths of the fields of spec and status that `found` would drop, without those below a missing one."""
    return [
        each
        for part in ("spec", "status")
        for each in _missing(expected["properties"].get(part, {}), found.get("properties", {}).get(part, {}), part)
    ]


def _missing(expected: Schema, found: Schema, path: str) -> list[str]:
    if found.get(PRESERVE):
        return []
    missing, properties = list[str](), found.get("properties", {})
    for name, node in expected.get("properties", {}).items():
        inner = f"{path}.{name}"
        missing += _missing(node, properties[name], inner) if name in properties else [inner]
    for part, suffix in (("items", "[]"), ("additionalProperties", ".*")):
        if isinstance(expected.get(part), dict):
            values = found.get(part)
            missing += _missing(expected[part], values if isinstance(values, dict) else {}, f"{path}{suffix}")
    return missing


@dataclass(frozen=True)
class KindSkew:
    """The differences of one kind."""

    expected: Schema
    """The schema of the operator's types."""
    installed: Schema
    """That of the CRD."""
    version: str
    """Version of the CRD."""

    def read(self, manifest: Manifest) -> tuple[Manifest, list[str]]:
        """Return a stored object without fields that only the CRD has, and the paths of those that are set."""
        found = list[str]()
        parts = {
            part: _drop_unknown(
                manifest[part], self._of(self.expected, part), self._of(self.installed, part), part, found
            )
            for part in ("spec", "status")
            if part in manifest
        }
        return manifest | parts, [path for path in found if path.startswith("spec.")]

    def cut(self, status: Manifest) -> Manifest:
        """Return what the API server stores of a status."""
        cut: Manifest = _cut(status, self._of(self.installed, "status"))
        return cut

    @staticmethod
    def _of(schema: Schema, part: str) -> Schema:
        node: Schema = schema.get("properties", {}).get(part, {})
        return node


@dataclass(frozen=True)
class Skew:
    """The kinds whose CRDs differ, by kind."""

    kinds: Mapping[str, KindSkew] = field(default_factory=dict)

    def read(self, kind: str, manifest: Manifest) -> tuple[Manifest, list[str]]:
        """Return an object as the operator's types know it, and one problem for each other field that is set."""
        of_kind = self.kinds.get(kind)
        if of_kind is None:
            return manifest, []
        known, unknown = of_kind.read(manifest)
        return known, [_describe_unknown(path, of_kind.version) for path in unknown]

    def cut(self, kind: str, status: Manifest) -> Manifest:
        """Return what the API server stores of a status."""
        return self.kinds[kind].cut(status) if kind in self.kinds else status

    def as_stored(self, kind: Literal["RLJob", "RewardModel"], status: OwnerStatus) -> Any:
        """Return the status as a later reconcile reads it."""
        return type(status).model_validate(self.cut(kind, status.to_manifest())) if kind in self.kinds else status


NO_SKEW = Skew()
"""CRDs with the fields of the operator's types."""


def _describe_unknown(path: str, version: str) -> str:
    return (
        f"{path} is a field of RLJob {version}, which this operator, {__version__}, does not know; "
        "upgrade the operator (helm upgrade), or remove the field"
    )


def _drop_unknown(value: Any, expected: Schema, installed: Schema, path: str, found: list[str]) -> Any:
    """Return `value` without fields that only `installed` has. `found` gets those that are set."""
    if expected.get(PRESERVE):
        return value
    if isinstance(value, list):
        nodes = expected.get("items", {}), installed.get("items", {})
        return [_drop_unknown(item, *nodes, f"{path}[{index}]", found) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    known = dict[str, Any]()
    for name, inner in value.items():
        own, other = _child(expected, name), _child(installed, name)
        if own is None and other is not None:
            found += [] if inner is None else [f"{path}.{name}"]
        else:
            known[name] = _drop_unknown(inner, own or {}, other or {}, f"{path}.{name}", found)
    return known


def _child(schema: Schema, name: str) -> Schema | None:
    values = schema.get("additionalProperties")
    child: Schema | None = schema.get("properties", {}).get(name, values if isinstance(values, dict) else None)
    return child


def _cut(value: Any, schema: Schema) -> Any:
    if schema.get(PRESERVE):
        return value
    if isinstance(value, list):
        return [_cut(item, schema.get("items", {})) for item in value]
    if not isinstance(value, dict):
        return value
    return {name: _cut(inner, child) for name, inner in value.items() if (child := _child(schema, name)) is not None}
