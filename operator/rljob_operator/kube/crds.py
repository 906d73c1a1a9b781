"""Whether the CRDs of a cluster know all that this operator's types say. Pure.

The API server drops a field that its CRD lacks without a word: a user's wish would be ignored, and a status written
again and again. Invariant: a CRD that knows more is newer, which is no problem.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rljob_api.generate.crd import build_object_schema
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.reward import RewardModel
from rljob_operator.kube.resources import REWARD_MODEL, RLJOB, Resource

Schema = dict[str, Any]
_PRESERVE = "x-kubernetes-preserve-unknown-fields"
_MODELS: dict[Resource, type[RLJob] | type[RewardModel]] = {RLJOB: RLJob, REWARD_MODEL: RewardModel}
_MAX_FIELDS_NAMED = 5


def crd_path(resource: Resource) -> str:
    """Where the API server has the resource's CRD."""
    return f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{resource.plural}.{resource.group}"


def find_schema(resource: Resource, crd: dict[str, Any]) -> Schema:
    """The schema by which a CRD serves our version; empty when it does not."""
    served = (v for v in crd["spec"]["versions"] if v["name"] == resource.version and v["served"])
    return next((version["schema"]["openAPIV3Schema"] for version in served), {})


def describe_problem(resource: Resource, crd: dict[str, Any]) -> str:
    """Why this operator cannot work with a CRD as it is; empty when it can."""
    name = f"CRD {resource.plural}.{resource.group}"
    served = find_schema(resource, crd)
    if not served:
        return f"{name} does not serve {resource.version}; apply the files in crds/"
    missing = find_missing_fields(build_object_schema(_MODELS[resource]), served)
    if not missing:
        return ""
    more = f" and {len(missing) - _MAX_FIELDS_NAMED} more" if len(missing) > _MAX_FIELDS_NAMED else ""
    fields = ", ".join(missing[:_MAX_FIELDS_NAMED]) + more
    return f"{name} is older than this operator: it has no {fields}; apply the files in crds/ (helm upgrade does)"


def find_missing_fields(wanted: Schema, served: Schema) -> list[str]:
    """Paths of the fields of spec and status that `served` would drop; of one that is missing, nothing below it."""
    return [
        field
        for part in ("spec", "status")
        for field in _missing(wanted["properties"][part], served.get("properties", {}).get(part, {}), part)
    ]


def _missing(wanted: Schema, served: Schema, path: str) -> Iterator[str]:
    if served.get(_PRESERVE):
        return
    for name, field in wanted.get("properties", {}).items():
        if name in served.get("properties", {}):
            yield from _missing(field, served["properties"][name], f"{path}.{name}")
        else:
            yield f"{path}.{name}"
    if "items" in wanted:
        yield from _missing(wanted["items"], served.get("items", {}), f"{path}[]")
    if isinstance(wanted.get("additionalProperties"), dict):
        served_values = served.get("additionalProperties")
        yield from _missing(
            wanted["additionalProperties"], served_values if isinstance(served_values, dict) else {}, f"{path}.*"
        )
