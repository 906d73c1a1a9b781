"""A job with the node labels and the memory limits that the operator gives its Pods: for `rljob plan` with a policy.

Reads them from the Pods as they would be built, so templates count, too. The defaults of the installation are unknown
here.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.policy import RLJobPolicy
from rljob_api.manifest.services.calls import CallService
from rljob_api.manifest.services.reward import RewardBase, RewardModel
from rljob_core.backend import Manifest
from rljob_core.children import WORKLOAD_KINDS, build_children
from rljob_core.children.pods import VLLM_CONTAINER
from rljob_core.children.start_model import with_any_claim
from rljob_core.defaults import DEFAULTS
from rljob_core.plan.policy_defaults import apply_policy, choose_queue
from rljob_core.plan.validate import find_child_problems, find_role_paths
from rljob_core.pod_checks.origin import RolePath
from rljob_inputs.memory.changes import change_job

_MEMORY = "memory"


def apply_to_job(job: RLJob, models: Mapping[str, RewardModel], policy: RLJobPolicy) -> RLJob:
    """Return the job as the policy's namespace builds it. Raise UserError if it cannot be built."""
    planned = with_any_claim(choose_queue(job, policy, {}))
    children, roles = build_children(planned, "", apply_policy(DEFAULTS, policy), models), find_role_paths(job)
    if problems := find_child_problems(job, children):
        raise UserError("\n".join(problems))
    fields: dict[str, Any] = {}
    for child in children:
        if child["kind"] in WORKLOAD_KINDS and (role := roles.get(child["metadata"]["name"])):
            fields |= dict(_list_fields(role, child["spec"]["template"]["spec"]))
    return change_job(job, fields)


def _list_fields(role: RolePath, pod: Manifest) -> Iterator[tuple[str, Any]]:
    path = role.path.removeprefix("spec.")
    if pod.get("nodeSelector"):
        yield f"{path}.nodePool.nodeSelector", pod["nodeSelector"]
    if limit := _find_limit(pod, role.container):
        yield f"{path}.resources.limits", {**role.role.resources.limits, _MEMORY: limit}
    service = role.role if isinstance(role.role, RewardBase | CallService) else None
    model = service.served_model if service else None
    if service and model and (limit := _find_limit(pod, VLLM_CONTAINER)):
        field = f"{path}.{service.served_model_field}.resources.limits"
        yield field, {**model.resources.limits, _MEMORY: limit}


def _find_limit(pod: Manifest, container: str) -> str | None:
    for each in (*(pod.get("initContainers") or []), *pod["containers"]):
        if each.get("name") == container:
            limit = ((each.get("resources") or {}).get("limits") or {}).get(_MEMORY)
            return None if limit is None else str(limit)
    return None
