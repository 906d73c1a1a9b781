"""The defaults of a namespace's RLJobPolicy, over those of the installation. Pure.

Leaves limits to `policy_limits`. Invariant: as of the installation's defaults, a change replaces no Pod of an existing
workload, and a job whose workloads exist stays in the queue that they were built for.
"""

from collections.abc import Mapping

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.policy import PolicyDefaults, PolicyPool, PolicyPools, PolicyResources, RLJobPolicy
from rljob_api.manifest.roles import Resources
from rljob_core.backend import ChildKey, Manifest
from rljob_core.children import WORKLOAD_KINDS
from rljob_core.defaults import Defaults, RoleResources

ANNOTATION_POLICY_QUEUE = "rljob.dev/policy-queue"
"""On workloads: the queue in which a policy put their job."""
_REPLACED = (
    *("trainer_image", "reward_image", "image_pull_policy", "reward_scratch_size", "priority_class_name"),
    *("runtime_class_name", "log_format"),
)
"""What a policy replaces, if it is set. It has the same name in both."""
_MERGED = ("python_images", "node_selector", "labels", "annotations")
"""Maps whose entries a policy replaces."""
_ADDED = ("image_pull_secrets", "tolerations")
"""Lists that a policy extends."""


def apply_policy(defaults: Defaults, policy: RLJobPolicy | None) -> Defaults:
    """Return the defaults for the objects of the policy's namespace."""
    if policy is None or (own := policy.spec.defaults) == PolicyDefaults():
        return defaults
    changes = {name: value for name in _REPLACED if (value := getattr(own, name)) is not None}
    changes |= {name: getattr(defaults, name) | getattr(own, name) for name in _MERGED}
    changes |= {name: [*getattr(own, name), *getattr(defaults, name)] for name in _ADDED}
    changes["resources"] = _merge_resources(defaults.resources, own.resources)
    changes["node_pools"] = _merge_pools(defaults.node_pools, own)
    return defaults.model_copy(update=changes)


def _merge_resources(installed: RoleResources, own: PolicyResources) -> RoleResources:
    changes = {
        name: _replace_resources(getattr(installed, name), getattr(own, name)) for name in PolicyResources.model_fields
    }
    return installed.model_copy(update=changes)


def _replace_resources(installed: Resources, own: Resources) -> Resources:
    """A request of the policy above a limit of the installation would be refused, so it replaces both."""
    given = own.requests.keys() | own.limits.keys()
    kept = {
        kind: {name: value for name, value in getattr(installed, kind).items() if name not in given}
        for kind in ("requests", "limits")
    }
    return Resources(requests=kept["requests"] | own.requests, limits=kept["limits"] | own.limits)


def _merge_pools(installed: PolicyPools, own: PolicyDefaults) -> PolicyPools:
    pools = {
        name: _merge_pool(getattr(installed, name), getattr(own.node_pools, name), own.node_selector)
        for name in PolicyPools.model_fields
    }
    return PolicyPools(**pools)


def _merge_pool(installed: PolicyPool, own: PolicyPool, of_all: Mapping[str, str]) -> PolicyPool:
    """`of_all`: labels that the policy sets for all roles. They replace those of the installation for one role, too."""
    kept = {name: value for name, value in installed.node_selector.items() if name not in of_all}
    return PolicyPool(
        node_selector=kept | own.node_selector,
        tolerations=[*own.tolerations, *installed.tolerations],
    )


def choose_queue(job: RLJob, policy: RLJobPolicy | None, children: Mapping[ChildKey, Manifest]) -> RLJob:
    """Return the job with the queue by which it is planned: its own, else that of a policy for which its workloads were
    built, else the policy's. `children`: those of this job that are not being deleted."""
    scheduling = job.spec.scheduling
    if scheduling.gang != "none" or scheduling.queue:
        return job
    workloads = [child for key, child in children.items() if key.kind in WORKLOAD_KINDS]
    queue = _find_built_queue(workloads) if workloads else policy and policy.spec.defaults.queue
    if not queue:
        return job
    chosen = scheduling.model_copy(update={"gang": "kueue", "queue": queue})
    return job.with_spec(scheduling=chosen)


def mark_queue(child: Manifest, queue: str) -> Manifest:
    """Return the child; a workload says that the queue is a policy's. A job that gave up its own leaves it."""
    metadata = child["metadata"]
    annotations = (metadata.get("annotations") or {}) | {ANNOTATION_POLICY_QUEUE: queue}
    return child | {"metadata": metadata | {"annotations": annotations}} if child["kind"] in WORKLOAD_KINDS else child


def _find_built_queue(workloads: list[Manifest]) -> str | None:
    found = ((each["metadata"].get("annotations") or {}).get(ANNOTATION_POLICY_QUEUE) for each in workloads)
    return next(filter(None, found), None)
