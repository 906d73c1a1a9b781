"""Pod templates: the common shape of all roles, filled in by each role's module; the user's template is merged last.

Invariants: no template can remove the labels that selectors need; no Pod has a service-account token, except for those
that claim sandboxes; all containers run unprivileged; what the user's template requires of a node
stays required, also of a Pod that avoids nodes with a broken GPU.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.pod_settings import PodSettings
from rljob_api.manifest.policy import PolicyPool
from rljob_api.manifest.roles import NodePool, Resources, Role
from rljob_api.manifest.services.models import ServedModel
from rljob_api.wire import contract
from rljob_core.backend import Manifest, Owner
from rljob_core.children import common
from rljob_core.children.configuration import (
    RETRY_FIELDS,
    find_avoided_nodes,
    read_configuration,
    read_restart_request,
    read_scheduling,
    without,
)
from rljob_core.children.env import build_log_env, override_env
from rljob_core.children.gang import (
    DISK,
    build_gang_metadata,
    build_gang_spec,
    build_topology_affinity,
    build_topology_annotations,
)
from rljob_core.children.keep import ANNOTATION_READ_ONCE, record_configuration
from rljob_core.children.merge import merge
from rljob_core.children.volumes import Volume
from rljob_core.defaults import Defaults

VLLM_CONTAINER = "vllm"
"""The sidecar of a reward with a served model."""
UNPRIVILEGED: Manifest = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
"""The securityContext of containers, unless they say otherwise."""
NODE_TOLERATION_SECONDS = 60
_NODE_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
_HOSTNAME = "kubernetes.io/hostname"
"""The node's name, unless its kubelet has another host name."""
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_RESOURCE_KINDS = ("requests", "limits")
POD_FIELDS = RETRY_FIELDS | {"image", "resources", "nodePool", "env", "template", "replicas", "autoscaling"}
"""Fields of a role that shape its Pods and that no program reads."""

KEEP_ANNOTATIONS = {
    # To consolidate nodes, a cluster autoscaler may evict Pods. Evicting one of the training group would cost all GPUs
    # the steps since the last checkpoint. An administrator can still drain a node.
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}


@dataclass(frozen=True)
class Sidecar:
    """A native sidecar (an init container that restarts) and the volumes that it mounts."""

    container: Manifest
    volumes: list[Volume]


@dataclass(frozen=True)
class PodParts:
    """What a role's module specifies about its Pods."""

    role: str
    spec: Role
    image: str
    defaults: Defaults
    command: list[str]
    labels: dict[str, str]
    config: Mapping[str, Any]
    """What the role reads: a change replaces the Pods."""
    ports: dict[str, int]
    env: list[Manifest]
    volumes: list[Volume]
    grace_seconds: int
    probes: Manifest = field(default_factory=dict)
    gpus: int = 0
    annotations: dict[str, str] = field(default_factory=dict)
    restart_policy: str = "Always"
    container_security: Manifest = field(default_factory=dict)
    drain_seconds: int = 0
    """Sleep before SIGTERM, while the Pod leaves its Service and in-flight requests end."""
    sidecar: Sidecar | None = None
    """Starts before the main container and ends after it."""
    service_account: str = ""
    """Whose token the containers get; empty: none."""
    read_again: Mapping[str, Collection[str]] = field(default_factory=dict)
    """By the annotation with the digest of the rest: paths in `config` that the program reads again."""
    spec_path: str = ""
    """Path of the role in the manifest, for errors; empty: spec.ROLE."""


def build_workload(
    owner: Owner, kind: str, name: str, parts: PodParts, spec: Manifest, *, publish_not_ready: bool = False
) -> list[Manifest]:
    """The headless Service and the workload of a role. `spec` is what the workload has besides selector and template.

    The name of the Service resolves to the addresses of the ready Pods; with publish_not_ready, of all Pods."""
    ports = [{"name": p, "port": port, "targetPort": p, "protocol": "TCP"} for p, port in parts.ports.items()]
    service = {
        "clusterIP": "None",
        "publishNotReadyAddresses": publish_not_ready,
        "selector": parts.labels,
        "ports": ports,
    }
    if kind != "Job":  # a Job generates its selector
        spec = spec | {"selector": {"matchLabels": parts.labels}}
    api_version = "batch/v1" if kind == "Job" else "apps/v1"
    spec = spec | {"template": _build_pod_template(owner, parts)}
    uses_hub = parts.role not in common.SERVING or parts.sidecar is not None
    configuration = read_configuration(owner, parts.role, parts.spec, parts.labels, parts.config, uses_hub=uses_hub)
    rest = {name: configuration | {"config": without(parts.config, paths)} for name, paths in parts.read_again.items()}
    workload = common.build_child(api_version, kind, owner, name, parts.labels, spec=spec)
    return [
        common.build_child("v1", "Service", owner, name, parts.labels, spec=service),
        record_configuration(workload, configuration, read_scheduling(owner), rest),
    ]


def _build_pod_template(owner: Owner, parts: PodParts) -> Manifest:
    """The whole template. The Pods of a job start as a gang, those of a RewardModel individually. Raises UserError if
    the user's template cannot be merged."""
    built, defaults = _build_metadata(owner, parts), parts.defaults
    gang = build_gang_spec(owner) if isinstance(owner, RLJob) else {}
    labels = common.build_app_labels(owner, parts.labels, has_pods=True) | defaults.labels | built["labels"]
    metadata = {"labels": labels, "annotations": defaults.annotations | built["annotations"]}
    template = {"metadata": metadata, "spec": _build_spec(owner, parts) | gang}
    template = merge(template, parts.spec.template, f"{parts.spec_path or f'spec.{parts.role}'}.template")
    # Selectors and the lifecycle depend on these: the user cannot change them.
    metadata = {name: (template["metadata"].get(name) or {}) | fields for name, fields in built.items()}
    spec = _complete_containers(template["spec"], owner, parts) | {"restartPolicy": parts.restart_policy}
    spec |= _tolerate_lost_nodes(spec, owner, parts.role)
    spec = avoid_nodes(spec, find_avoided_nodes(owner, parts.role, parts.labels))
    return template | {"metadata": template["metadata"] | metadata, "spec": spec}


def _build_metadata(owner: Owner, parts: PodParts) -> Manifest:
    read_once = without(parts.config, parts.read_again.get(ANNOTATION_READ_ONCE, ()))
    annotations = {common.ANNOTATION_CONFIG_HASH: common.digest(read_once)} | parts.annotations
    if owner.metadata.uid:
        annotations[common.ANNOTATION_JOB_UID] = owner.metadata.uid
    if request := read_restart_request(owner, parts.role, parts.labels):
        annotations[common.ANNOTATION_RESTARTED] = request
    labels, more = build_gang_metadata(owner, parts.spec) if isinstance(owner, RLJob) else ({}, {})
    labels = _label_domain(owner, parts) | {contract.LABEL_MANAGED_BY: contract.MANAGED_BY} | labels
    return {"labels": labels, "annotations": annotations | more | build_topology_annotations(owner, parts.spec)}


def _label_domain(owner: Owner, parts: PodParts) -> dict[str, str]:
    """The labels of the role's Pods that share one domain: all, or those that avoid the same nodes. A Deployment
    replaces its Pods one by one: new ones that had to join the old ones on a node that they avoid would never start."""
    nodes = find_avoided_nodes(owner, parts.role, parts.labels)
    if not nodes or parts.spec.node_pool.topology is None:
        return parts.labels
    return parts.labels | {common.LABEL_AVOIDS: common.digest(sorted(nodes))}


def _build_spec(owner: Owner, parts: PodParts) -> Manifest:
    volumes = [*parts.volumes, *(parts.sidecar.volumes if parts.sidecar else [])]
    spec: Manifest = {
        "restartPolicy": parts.restart_policy,
        "terminationGracePeriodSeconds": parts.grace_seconds,
        "automountServiceAccountToken": bool(parts.service_account),
        "enableServiceLinks": False,  # vLLM and Ray would read some of these variables as their settings
        "securityContext": parts.defaults.pod_security_context.to_manifest(),
        **build_settings(owner, parts.defaults),
        **({"serviceAccountName": parts.service_account} if parts.service_account else {}),
        **({"initContainers": [parts.sidecar.container]} if parts.sidecar else {}),
        "containers": [_build_container(parts)],
        # By name: a volume may be mounted twice.
        "volumes": list({volume.name: {"name": volume.name} | volume.source for volume in volumes}.values()),
    }
    spec |= build_placement(parts.spec.node_pool, parts.defaults, parts.role)
    affinity = build_topology_affinity(owner, parts.spec, _label_domain(owner, parts))
    if parts.spec.node_pool.exclusive:
        affinity |= {"podAntiAffinity": _build_exclusive(parts.role)}
    spec |= {"affinity": affinity} if affinity else {}
    return spec


def build_placement(pool: NodePool, defaults: Defaults, role: str) -> Manifest:
    """The fields of Pods that choose their nodes, without `exclusive`."""
    spec: Manifest = {}
    of_role: PolicyPool = getattr(defaults.node_pools, _resolve_role(role))
    if node_selector := defaults.node_selector | of_role.node_selector | pool.node_selector:
        spec["nodeSelector"] = node_selector
    if tolerations := [*pool.tolerations, *of_role.tolerations, *defaults.tolerations]:
        spec["tolerations"] = [toleration.to_manifest() for toleration in tolerations]
    return spec


def _resolve_role(role: str) -> str:
    """The role that has the defaults of `role`: an agent's Pods run the server of a reward."""
    return common.REWARD if role == common.AGENT else role


def build_settings(owner: Owner, defaults: Defaults) -> Manifest:
    """The fields of all Pods of a job or a RewardModel that are set."""
    settings: PodSettings = owner.spec
    secrets = [secret.name for secret in (*settings.image_pull_secrets, *defaults.image_pull_secrets)]
    fields = {
        "priorityClassName": settings.priority_class_name or defaults.priority_class_name,
        "runtimeClassName": settings.runtime_class_name or defaults.runtime_class_name,
        "serviceAccountName": settings.service_account_name,
        "imagePullSecrets": [{"name": name} for name in dict.fromkeys(secrets)],
    }
    return {name: value for name, value in fields.items() if value}


def _restrict(container: Manifest) -> Manifest:
    """A container, also of the template, gets no more than it asks for."""
    own = container.get("securityContext") or {}
    if not isinstance(own, dict):
        return container  # the checks of Pod templates report it
    # The API server refuses a privileged container without privilege escalation.
    return container if own.get("privileged") else container | {"securityContext": UNPRIVILEGED | own}


def _complete_containers(spec: Manifest, owner: Owner, parts: PodParts) -> Manifest:
    """The Pod's spec with restricted containers, and the default requests and limits of those that RLJob builds. What
    the job says about a resource, in `resources` or in the template, of the container or of the whole Pod, replaces
    both defaults."""
    defaults = parts.defaults.resources
    of_role = getattr(defaults, _resolve_role(parts.role))
    by_container = {parts.role: of_role, VLLM_CONTAINER: defaults.vllm}
    if isinstance(owner, RLJob) and owner.spec.scheduling.gang == "kueue":
        by_container = {name: _without_disk(resources) for name, resources in by_container.items()}
    lists = {name: spec[name] for name in ("containers", "initContainers") if spec.get(name)}
    whole = _as_mapping(spec.get("resources"))
    return spec | {
        name: [_restrict(_fill(each, by_container.get(str(each.get("name"))), whole)) for each in containers]
        for name, containers in lists.items()
    }


def _without_disk(resources: Resources) -> Resources:
    """Kueue admits no Pod with a resource that its queue does not cover, and few queues cover disks."""
    requests = {name: value for name, value in resources.requests.items() if name != DISK}
    return resources.model_copy(update={"requests": requests})


def _as_mapping(value: Any) -> Manifest:
    return value if isinstance(value, dict) else {}


def _fill(container: Manifest, defaults: Resources | None, whole: Manifest) -> Manifest:
    if defaults is None:
        return container
    own = container.get("resources") or {}
    if not all(
        value is None or isinstance(value, dict) for value in (own, *(_as_mapping(own).get(k) for k in _RESOURCE_KINDS))
    ):
        return container  # the checks of Pod templates report it
    given = {name for holder in (own, whole) for kind in _RESOURCE_KINDS for name in _as_mapping(holder.get(kind))}
    missing = {
        kind: {name: value for name, value in default.items() if name not in given}
        for kind, default in (("requests", defaults.requests), ("limits", defaults.limits))
    }
    filled = {kind: (own.get(kind) or {}) | more for kind, more in missing.items() if more}
    return container | {"resources": own | filled} if filled else container


def pull_policy(defaults: Defaults) -> Manifest:
    return {"imagePullPolicy": defaults.image_pull_policy} if defaults.image_pull_policy else {}


def _tolerate_lost_nodes(spec: Manifest, owner: Owner, role: str) -> Manifest:
    """The Pod's tolerations, with short ones of a lost node unless it has its own: Kubernetes takes the first match.
    Without its lost node's Pod the whole training group waits, so a job that replaces such Pods does not wait the 300 s
    that Kubernetes adds. Without forced deletion, an earlier deletion would only end Pods whose node returns."""
    if not isinstance(owner, RLJob) or owner.spec.scheduling.force_delete_after_seconds is None:
        return {}
    given = spec.get("tolerations") or []
    is_list = isinstance(given, list) and all(isinstance(each, dict) for each in given)
    if role not in (common.HEAD, common.TRAINER) or not is_list:
        return {}  # the checks of Pod templates report anything else
    own = {each.get("key") for each in given}
    wait = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": NODE_TOLERATION_SECONDS}
    # A toleration without a key is for every taint.
    added = [{"key": key} | wait for key in _NODE_TAINTS if not own & {key, None}]
    return {"tolerations": [*given, *added]} if added else {}


def _build_container(parts: PodParts) -> Manifest:
    return {
        "name": parts.role,
        "image": parts.spec.image or parts.image,
        **pull_policy(parts.defaults),
        "command": parts.command,
        "env": override_env([*parts.env, *build_log_env(parts.defaults)], parts.spec.env),
        "ports": [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in parts.ports.items()],
        **parts.probes,
        **({"lifecycle": {"preStop": {"sleep": {"seconds": parts.drain_seconds}}}} if parts.drain_seconds else {}),
        "resources": build_resources(parts.spec, parts.spec.node_pool, parts.gpus),
        "securityContext": UNPRIVILEGED | parts.container_security,
        # After a crash without a message, its last log lines explain it.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [volume.build_mount() for volume in parts.volumes],
    }


def build_resources(role: Role | ServedModel, pool: NodePool, gpus: int) -> Manifest:
    """Requests and limits as given; GPUs are a limit, which is also the request."""
    limits = ({pool.gpu_resource: gpus} if gpus else {}) | role.resources.limits
    resources: Manifest = {"limits": limits, "requests": role.resources.requests}
    return {kind: {name: str(value) for name, value in q.items()} for kind, q in resources.items() if q}


def _build_exclusive(role: str) -> Manifest:
    """Excludes nodes that run another role of any RLJob. NotIn alone also matches Pods without the label."""
    return {
        "requiredDuringSchedulingIgnoredDuringExecution": [
            {
                "labelSelector": {
                    "matchExpressions": [
                        {"key": contract.LABEL_ROLE, "operator": "Exists"},
                        {"key": contract.LABEL_ROLE, "operator": "NotIn", "values": [role]},
                    ]
                },
                "namespaceSelector": {},
                "topologyKey": "kubernetes.io/hostname",
            }
        ]
    }


def build_root_security(defaults: Defaults) -> Manifest:
    """The part of a container's securityContext about its root file system. With build_home_volumes."""
    return {"readOnlyRootFilesystem": True} if defaults.read_only_root_filesystem else {}


def avoid_nodes(spec: Manifest, nodes: Sequence[str]) -> Manifest:
    """The spec of a Pod that is not scheduled to `nodes`. Terms of a node selector are alternatives, so that each gets
    the requirement."""
    if not nodes:
        return spec
    affinity = _as_mapping(spec.get("affinity"))
    node_affinity = _as_mapping(affinity.get("nodeAffinity"))
    required = _as_mapping(node_affinity.get(_REQUIRED))
    added: Manifest = {"key": _HOSTNAME, "operator": "NotIn", "values": sorted(nodes)}
    terms = [_as_mapping(term) for term in required.get("nodeSelectorTerms") or [{}]]
    terms = [term | {"matchExpressions": [*(term.get("matchExpressions") or []), added]} for term in terms]
    node_affinity = node_affinity | {_REQUIRED: required | {"nodeSelectorTerms": terms}}
    return spec | {"affinity": affinity | {"nodeAffinity": node_affinity}}


def avoided_by(spec: Manifest) -> list[str]:
    """The nodes to which the spec of a Pod allows no scheduling by its name."""
    required = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(_REQUIRED) or {}
    expressions = [
        each for term in required.get("nodeSelectorTerms") or [] for each in term.get("matchExpressions") or []
    ]
    by_name = [each for each in expressions if (each["key"], each["operator"]) == (_HOSTNAME, "NotIn")]
    return sorted({node for each in by_name for node in each["values"]})


_STARTUP_PERIOD_SECONDS = 5
_HUNG_GRACE_SECONDS = 10
_PATIENCE_SECONDS = 60
"""For which a program may answer nothing before it is killed."""


def build_probes(port_name: str, startup_seconds: int, failure_threshold: int = 2) -> Manifest:
    """Readiness probes the program, liveness a path that is answered whenever its event loop runs: a rollout with old
    weights, or a reward server with a full queue, is unready but alive, and a restart would make it worse. A port is no
    sign of life: the kernel accepts connections of a stopped process. `failure_threshold`: of readiness."""
    live = {"path": contract.UrlPath.LIVE.value, "port": port_name}
    return {
        "startupProbe": {
            "tcpSocket": {"port": port_name},
            "periodSeconds": _STARTUP_PERIOD_SECONDS,
            "failureThreshold": startup_seconds // _STARTUP_PERIOD_SECONDS,
        },
        "livenessProbe": build_liveness({"httpGet": live}, _PATIENCE_SECONDS),
        "readinessProbe": build_readiness(port_name) | {"failureThreshold": failure_threshold},
    }


def build_liveness(action: Manifest, patience_seconds: int, period_seconds: int = 10) -> Manifest:
    """A program that answers nothing does not hear SIGTERM, so it gets little time to end."""
    return action | {
        "periodSeconds": period_seconds,
        "timeoutSeconds": 5,
        "failureThreshold": patience_seconds // period_seconds,
        "terminationGracePeriodSeconds": _HUNG_GRACE_SECONDS,
    }


def build_readiness(port_name: str) -> Manifest:
    return {
        "httpGet": {"path": str(contract.UrlPath.READY), "port": port_name},
        "periodSeconds": 5,
        "timeoutSeconds": 3,
        "failureThreshold": 2,
    }
