"""Whether the installed CRDs have exactly the fields of the operator's types.

The API server silently drops a field that its CRD lacks: settings would be ignored, and a status rewritten in each
reconcile. A field that only the CRD has may hold a setting that the operator would ignore. So CRDs and operator must
be of the same version.
"""

import logging
from collections.abc import Iterator
from typing import Any

from rljob_api.errors import TransientError
from rljob_api.generate.crd import Kind, build_object_schema
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.policy import RLJobPolicy
from rljob_api.manifest.services.reward import RewardModel
from rljob_core.kube.client import ApiError, KubeApi
from rljob_core.kube.resources import POLICY, REWARD_MODEL, RLJOB, Resource

log = logging.getLogger(__name__)

Schema = dict[str, Any]
UPGRADE_CRDS = "upgrade the CRDs: helm upgrade, or kubectl apply --server-side -f crds/"
UPGRADE_OPERATOR = "upgrade the operator: helm upgrade"
MAX_LISTED_FIELDS = 5
_PRESERVE = "x-kubernetes-preserve-unknown-fields"
_MODELS: dict[Resource, Kind] = {RLJOB: RLJob, REWARD_MODEL: RewardModel, POLICY: RLJobPolicy}


async def find_crd_problem(api: KubeApi) -> str:
    """Return why the operator must not start with the installed CRDs; empty if it may, or may not read them."""
    for resource in _MODELS:
        name = f"{resource.plural}.{resource.group}"
        try:
            crd = await api.request("GET", f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}")
        except ApiError as error:
            if error.code == 403:
                log.warning("no permission to read CustomResourceDefinitions: their version is not checked")
                return ""
            return f"CRD {name}: {error.message}; {UPGRADE_CRDS}"
        except TransientError as error:
            return str(error)
        if problem := describe_problem(resource, crd):
            return problem
    return ""


def describe_problem(resource: Resource, crd: dict[str, Any]) -> str:
    """Return how a CRD differs from the operator's types; empty if it does not."""
    name = f"CRD {resource.plural}.{resource.group}"
    served = (v for v in crd["spec"]["versions"] if v["name"] == resource.version and v["served"])
    installed: Schema = next((version["schema"]["openAPIV3Schema"] for version in served), {})
    if not installed:
        return f"{name} does not serve {resource.version}; {UPGRADE_CRDS}"
    expected = build_object_schema(_MODELS[resource])
    if missing := find_missing_fields(expected, installed):
        return f"{name} is older than this operator: it lacks {_join(missing)}; {UPGRADE_CRDS}"
    if unknown := find_missing_fields(installed, expected):
        return f"{name} is newer than this operator, which does not know {_join(unknown)}; {UPGRADE_OPERATOR}"
    return ""


def _join(fields: list[str]) -> str:
    more = f" and {len(fields) - MAX_LISTED_FIELDS} more" if len(fields) > MAX_LISTED_FIELDS else ""
    return ", ".join(fields[:MAX_LISTED_FIELDS]) + more


def find_missing_fields(expected: Schema, found: Schema) -> list[str]:
    """Return the paths of the fields of spec and status that `found` would drop, without those below a missing one."""
    return [
        field
        for part in ("spec", "status")
        for field in _missing(expected["properties"].get(part, {}), found.get("properties", {}).get(part, {}), part)
    ]


def _missing(expected: Schema, found: Schema, path: str) -> Iterator[str]:
    if found.get(_PRESERVE):
        return
    for name, field in expected.get("properties", {}).items():
        if name in found.get("properties", {}):
            yield from _missing(field, found["properties"][name], f"{path}.{name}")
        else:
            yield f"{path}.{name}"
    if "items" in expected:
        yield from _missing(expected["items"], found.get("items", {}), f"{path}[]")
    if isinstance(expected.get("additionalProperties"), dict):
        values = found.get("additionalProperties")
        values = values if isinstance(values, dict) else {}
        yield from _missing(expected["additionalProperties"], values, f"{path}.*")
