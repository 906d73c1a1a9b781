"""Whether the operator may start with the installed CRDs.

The API server refuses or drops a field that its CRD lacks, so the CRDs must have all fields of the operator. They may
have others, if they are at most one minor version apart: an object that sets one is left alone (`manifests`).
"""

import logging
import re
from typing import Any

from rljob_api import __version__
from rljob_api.errors import TransientError
from rljob_api.generate.crd import Kind, build_object_schema
from rljob_api.manifest.base import PRESERVE
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.policy import RLJobPolicy
from rljob_api.manifest.services.reward import RewardModel
from rljob_api.phrases import list_some
from rljob_api.wire.contract import ANNOTATION_CRD_VERSION
from rljob_core.kube.client import ApiError, KubeApi
from rljob_core.kube.resources import POLICY, REWARD_MODEL, RLJOB, Resource

log = logging.getLogger(__name__)

UPGRADE_CRDS = "upgrade the CRDs: helm upgrade, or kubectl apply --server-side -f crds/"
UPGRADE_OPERATOR = "upgrade the operator: helm upgrade"
MAX_LISTED_FIELDS = 5
MAX_MINORS = 1
"""How many minor versions CRDs and operator may be apart."""
_MINOR = re.compile(r"^(\d+)\.(\d+)\.\d+")
Schema = dict[str, Any]
_MODELS: dict[Resource, Kind] = {RLJOB: RLJob, REWARD_MODEL: RewardModel, POLICY: RLJobPolicy}


async def check_crds(api: KubeApi) -> str:
    """Return why the operator must not start; empty: it may, or may not read the CRDs. Logs what is tolerated."""
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
        problem, may_start = compare_crd(resource, crd)
        if not may_start:
            return problem
        if problem:
            log.warning("%s. Until then, an object that sets a field that only the CRD has is left alone", problem)
    return ""


def compare_crd(resource: Resource, crd: dict[str, Any]) -> tuple[str, bool]:
    """Return how a CRD differs from the operator's types, empty if it does not, and whether the operator may run with
    it."""
    name = f"CRD {resource.plural}.{resource.group}"
    served = (v for v in crd["spec"]["versions"] if v["name"] == resource.version and v["served"])
    installed: Schema = next((version["schema"]["openAPIV3Schema"] for version in served), {})
    if not installed:
        return f"{name} does not serve {resource.version}; {UPGRADE_CRDS}", False
    expected = build_object_schema(_MODELS[resource])
    missing, unknown = find_missing_fields(expected, installed), find_missing_fields(installed, expected)
    if not missing and not unknown:
        return "", True
    version = (crd["metadata"].get("annotations") or {}).get(ANNOTATION_CRD_VERSION, "")
    minors = count_minors(version)
    may_start = not missing and minors is not None and abs(minors) <= MAX_MINORS
    return f"{name} {_describe_difference(missing, unknown, version)}", may_start


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


def _describe_difference(missing: list[str], unknown: list[str], version: str) -> str:
    of = f" ({version}, operator {__version__})" if version else ""
    if missing and unknown:
        return (
            f"differs from this operator{of}: it lacks {_join(missing)}, and has {_join(unknown)} in addition; "
            f"{UPGRADE_CRDS}"
        )
    if missing:
        return f"is older than this operator{of}: it lacks {_join(missing)}; {UPGRADE_CRDS}"
    return f"is newer than this operator{of}, which does not know {_join(unknown)}; {UPGRADE_OPERATOR}"


def _join(fields: list[str]) -> str:
    return list_some(fields, MAX_LISTED_FIELDS)
