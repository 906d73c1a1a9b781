"""The labels, annotations and scheduler fields that spec.scheduling and nodePool.topology add to Pods.

A topology is one domain for all Pods of a role, such as a rack or the nodes that NVLink connects. Under gang kueue,
Kueue chooses the domain when it admits the group, and pins the Pods to it; its annotations say which label. Otherwise
the Pods have an affinity for each other, and the scheduler follows the first Pod. A Pod has one of the two, because
Kueue does not read affinities between Pods and could pin them to another domain.

Owns the field names of Kueue; its test names their sources. Invariant: they depend on the spec only, and a
running workload keeps its own (`keep_gang`), because a changed template would restart its Pods needlessly.
"""

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.roles import Role
from rljob_api.manifest.services.base import ServiceSettings
from rljob_api.wire.contract import SCHEDULING_GATE
from rljob_core.backend import Manifest, Owner

LABEL_KUEUE_QUEUE = "kueue.x-k8s.io/queue-name"
LABEL_KUEUE_GROUP = "kueue.x-k8s.io/pod-group-name"
LABEL_KUEUE_MANAGED = "kueue.x-k8s.io/managed"
GATE_KUEUE = "kueue.x-k8s.io/admission"
"""Kueue adds it to a Pod and removes it when it admits the group."""
ANNOTATION_KUEUE_COUNT = "kueue.x-k8s.io/pod-group-total-count"
ANNOTATION_KUEUE_PARENT = "kueue.x-k8s.io/pod-suspending-parent"
"""Declares that a controller replaces these Pods. Without it Kueue keeps a failed Pod by a finalizer until its
replacement exists, but a StatefulSet never creates that while the failed Pod has the name."""
ANNOTATION_KUEUE_RETRIABLE = "kueue.x-k8s.io/retriable-in-group"
"""false: the group is finished, and its quota released, when none of its Pods runs. Otherwise all Pods would have to
succeed, which rollouts and rewards never do."""
_METADATA = {
    *(LABEL_KUEUE_QUEUE, LABEL_KUEUE_GROUP, LABEL_KUEUE_MANAGED),
    *(ANNOTATION_KUEUE_COUNT, ANNOTATION_KUEUE_PARENT, ANNOTATION_KUEUE_RETRIABLE),
}
ANNOTATION_KUEUE_REQUIRED = "kueue.x-k8s.io/podset-required-topology"
ANNOTATION_KUEUE_PREFERRED = "kueue.x-k8s.io/podset-preferred-topology"
_TOPOLOGY_WEIGHT = 100
"""Weight of the preference, from 1 to 100: above the scheduler's own preferences."""
DISK = "ephemeral-storage"
_GATE = {"name": SCHEDULING_GATE}


def is_outside_gang(job: RLJob, role: Role) -> bool:
    """Whether each Pod of the role is queued alone. Kueue deletes Pods beyond a group's count, so what is autoscaled
    cannot be in the group."""
    return job.spec.scheduling.gang == "kueue" and isinstance(role, ServiceSettings) and role.autoscaling is not None


def count_gang_pods(job: RLJob) -> int:
    """Pods that start together under Kueue. Rewards served elsewhere have none."""
    services = [service.settings for service in job.spec.services]
    fixed = [each.replicas for each in services if each.is_served and not each.autoscaling]
    return 1 + job.spec.num_trainer_pods + job.spec.num_rollout_pods + sum(fixed)


def build_gang_metadata(job: RLJob, role: Role) -> tuple[dict[str, str], dict[str, str]]:
    """Labels and annotations for the Pods of a role."""
    scheduling, name = job.spec.scheduling, job.metadata.name
    if scheduling.gang == "kueue":
        labels = {LABEL_KUEUE_QUEUE: scheduling.queue or "", LABEL_KUEUE_MANAGED: "true"}
        annotations = {ANNOTATION_KUEUE_PARENT: "rljob"}
        if is_outside_gang(job, role):  # as Kueue's own integration of Deployments
            return labels, annotations
        group = {ANNOTATION_KUEUE_COUNT: str(count_gang_pods(job)), ANNOTATION_KUEUE_RETRIABLE: "false"}
        return labels | {LABEL_KUEUE_GROUP: name}, annotations | group
    return {}, {}


def build_gang_spec(job: RLJob) -> Manifest:
    scheduling = job.spec.scheduling
    spec: Manifest = {"schedulerName": scheduling.scheduler_name} if scheduling.scheduler_name else {}
    return spec | ({"schedulingGates": [_GATE]} if scheduling.gang == "gates" else {})


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
    preferred = {"weight": _TOPOLOGY_WEIGHT, "podAffinityTerm": term}
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [preferred]}}


def _is_placed_by_kueue(owner: Owner, role: Role) -> bool:
    """Whether the role's Pods are in one group of Kueue. It queues those of an autoscaled reward one by one."""
    return isinstance(owner, RLJob) and owner.spec.scheduling.gang == "kueue" and not is_outside_gang(owner, role)


def keep_gang(desired: Manifest, running: Manifest | None) -> Manifest:
    """The workload `desired` with the gang fields of the template of `running`."""
    if running is None:
        return desired
    old, new = running["spec"]["template"], desired["spec"]["template"]
    if _gang_of(old) == _gang_of(new):
        return desired
    metadata = dict(new["metadata"])
    for part in ("labels", "annotations"):
        others = {key: value for key, value in (metadata.get(part) or {}).items() if key not in _METADATA}
        metadata[part] = others | _gang_of(old)[part]
    spec = {name: value for name, value in new["spec"].items() if name not in ("schedulerName", "schedulingGates")}
    if "schedulerName" in old["spec"]:
        spec["schedulerName"] = old["spec"]["schedulerName"]
    gates = [gate for gate in new["spec"].get("schedulingGates") or [] if gate != _GATE] + _gang_of(old)["gates"]
    spec |= {"schedulingGates": gates} if gates else {}
    for name in ("containers", "initContainers"):
        if name in spec:
            spec[name] = [_keep_disk(container, old["spec"].get(name) or []) for container in spec[name]]
    return desired | {"spec": desired["spec"] | {"template": new | {"metadata": metadata, "spec": spec}}}


def _keep_disk(container: Manifest, running: list[Manifest]) -> Manifest:
    """The container with the disk that it requested: a Pod in a Kueue workload may not begin to request any."""
    before = next((each for each in running if each["name"] == container["name"]), container)
    kept = {name: value for name, value in _requests_of(before).items() if name == DISK}
    requests = {name: value for name, value in _requests_of(container).items() if name != DISK} | kept
    return container | {"resources": (container.get("resources") or {}) | {"requests": requests}}


def _requests_of(container: Manifest) -> Manifest:
    requests: Manifest = (container.get("resources") or {}).get("requests") or {}
    return requests


def _gang_of(template: Manifest) -> Manifest:
    parts = {part: (template.get("metadata") or {}).get(part) or {} for part in ("labels", "annotations")}
    found: Manifest = {part: {k: v for k, v in all_.items() if k in _METADATA} for part, all_ in parts.items()}
    return found | {"gates": [gate for gate in template["spec"].get("schedulingGates") or [] if gate == _GATE]}
