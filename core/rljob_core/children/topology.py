"""nodePool.topology: all Pods of a role in one domain, such as a rack or the nodes that NVLink connects.

Under gang kueue, Kueue chooses the domain when it admits the group, and pins the Pods to it; its annotations say which
label. Otherwise the Pods have an affinity for each other, and the scheduler follows the first Pod. Invariant: a Pod has
one of the two, because Kueue does not read affinities between Pods and could pin them to another domain.
"""

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.roles import Role
from rljob_core.backend import Manifest, Owner
from rljob_core.children.gang import is_outside_gang

ANNOTATION_KUEUE_REQUIRED = "kueue.x-k8s.io/podset-required-topology"
ANNOTATION_KUEUE_PREFERRED = "kueue.x-k8s.io/podset-preferred-topology"
_WEIGHT = 100
"""Weight of the preference, from 1 to 100: above the scheduler's own preferences."""


def build_topology_annotations(owner: Owner, role: Role) -> dict[str, str]:
    """What Kueue reads."""
    topology = role.node_pool.topology
    if topology is None or not _is_placed_by_kueue(owner, role):
        return {}
    return {ANNOTATION_KUEUE_REQUIRED if topology.required else ANNOTATION_KUEUE_PREFERRED: topology.key}


def build_topology_affinity(owner: Owner, role: Role, labels: dict[str, str]) -> Manifest:
    """The Pod's affinity for the others of its role, by `labels`; empty if it needs none. A role's first Pod may start
    on any node, because Kubernetes lets a Pod satisfy its own required affinity."""
    topology = role.node_pool.topology
    if topology is None or _is_placed_by_kueue(owner, role):
        return {}
    term = {"labelSelector": {"matchLabels": labels}, "topologyKey": topology.key}
    if topology.required:
        return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    preferred = {"weight": _WEIGHT, "podAffinityTerm": term}
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [preferred]}}


def _is_placed_by_kueue(owner: Owner, role: Role) -> bool:
    """Whether the role's Pods are in one group of Kueue. It queues those of an autoscaled reward one by one."""
    return isinstance(owner, RLJob) and owner.spec.scheduling.gang == "kueue" and not is_outside_gang(owner, role)
