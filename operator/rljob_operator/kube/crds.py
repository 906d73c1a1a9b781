"""Whether the operator may start with the installed CRDs.

The API server silently drops a field that its CRD lacks: settings would be ignored, and a status rewritten in each
reconcile. A field that only the CRD has may hold a setting that the operator would ignore. So CRDs and operator must
have the same fields, or be at most one minor version apart: then `skew` says what is left out and refused.
"""

import logging
from dataclasses import dataclass
from typing import Any

from rljob_api import __version__
from rljob_api.errors import TransientError
from rljob_api.generate.crd import Kind, build_object_schema
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.policy import RLJobPolicy
from rljob_api.manifest.services.reward import RewardModel
from rljob_api.phrases import list_some
from rljob_api.wire.contract import ANNOTATION_CRD_VERSION
from rljob_core.kube.client import ApiError, KubeApi
from rljob_core.kube.resources import POLICY, REWARD_MODEL, RLJOB, Resource
from rljob_operator.kube.skew import NO_SKEW, KindSkew, Schema, Skew, count_minors, find_missing_fields

log = logging.getLogger(__name__)

UPGRADE_CRDS = "upgrade the CRDs: helm upgrade, or kubectl apply --server-side -f crds/"
UPGRADE_OPERATOR = "upgrade the operator: helm upgrade"
MAX_LISTED_FIELDS = 5
MAX_MINORS = 1
"""How many minor versions CRDs and operator may be apart."""
_MODELS: dict[Resource, Kind] = {RLJOB: RLJob, REWARD_MODEL: RewardModel, POLICY: RLJobPolicy}


@dataclass(frozen=True)
class CrdCheck:
    """The answer to both questions about the installed CRDs."""

    problem: str = ""
    """Why the operator must not start; empty: it may, or may not read them."""
    skew: Skew = NO_SKEW
    """What differs, if it may."""


async def check_crds(api: KubeApi) -> CrdCheck:
    """Compare the installed CRDs with the operator's types, and log what is tolerated."""
    kinds = dict[str, KindSkew]()
    for resource in _MODELS:
        name = f"{resource.plural}.{resource.group}"
        try:
            crd = await api.request("GET", f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}")
        except ApiError as error:
            if error.code == 403:
                log.warning("no permission to read CustomResourceDefinitions: their version is not checked")
                return CrdCheck()
            return CrdCheck(f"CRD {name}: {error.message}; {UPGRADE_CRDS}")
        except TransientError as error:
            return CrdCheck(str(error))
        problem, skew = compare_crd(resource, crd)
        if problem and skew is None:
            return CrdCheck(problem)
        if skew is not None:
            log.warning("%s. Until then, an object that sets a field that only the CRD has is refused", problem)
            kinds[resource.kind] = skew
    return CrdCheck(skew=Skew(kinds))


def compare_crd(resource: Resource, crd: dict[str, Any]) -> tuple[str, KindSkew | None]:
    """Return how a CRD differs from the operator's types, empty if it does not, and the difference if the operator may
    run with it."""
    name = f"CRD {resource.plural}.{resource.group}"
    served = (v for v in crd["spec"]["versions"] if v["name"] == resource.version and v["served"])
    installed: Schema = next((version["schema"]["openAPIV3Schema"] for version in served), {})
    if not installed:
        return f"{name} does not serve {resource.version}; {UPGRADE_CRDS}", None
    expected = build_object_schema(_MODELS[resource])
    missing, unknown = find_missing_fields(expected, installed), find_missing_fields(installed, expected)
    if not missing and not unknown:
        return "", None
    version = (crd["metadata"].get("annotations") or {}).get(ANNOTATION_CRD_VERSION, "")
    minors = count_minors(version)
    skew = KindSkew(expected, installed, version) if minors is not None and abs(minors) <= MAX_MINORS else None
    return f"{name} {_describe_difference(missing, unknown, version)}", skew


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
