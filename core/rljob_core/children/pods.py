"""Pod templates: the common shape of all roles, filled in by each role's module; the user's template is merged last.

Invariants: no template can remove the labels that selectors need; no Pod has a service-account token, except for those
that claim sandboxes; all containers run unprivileged.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.pod_settings import POD_SETTINGS as POD_SETTINGS
from rljob_api.manifest.pod_settings import PodSettings
from rljob_api.manifest.policy import PolicyPool
from rljob_api.manifest.roles import NodePool, Resources, Role
from rljob_api.manifest.services.models import ServedModel
from rljob_api.manifest.sources import OBJECT_VARIABLES, Hub, ObjectStorage, parse_source
from rljob_api.wire import contract
from rljob_core.backend import Manifest, Owner
from rljob_core.children import common
from rljob_core.children.avoidance import avoid_nodes
from rljob_core.children.configuration import (
    RETRY_FIELDS,
    find_avoided_nodes,
    read_configuration,
    read_restart_request,
    read_scheduling,
)
from rljob_core.children.configuration import read_settings as read_settings
from rljob_core.children.gang import DISK, build_gang_metadata, build_gang_spec
from rljob_core.children.keep import record_configuration
from rljob_core.children.merge import merge
from rljob_core.children.start_model import list_model_env
from rljob_core.children.topology import build_topology_affinity, build_topology_annotations
from rljob_core.defaults import Defaults

TOKEN_KEY = "token"
VLLM_CONTAINER = "vllm"
"""The sidecar of a reward with a served model."""
UNPRIVILEGED: Manifest = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
"""The securityContext of containers, unless they say otherwise."""
NODE_TOLERATION_SECONDS = 60
_NODE_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
ENV_HUB_ENDPOINT = "HF_ENDPOINT"
ENV_HUB_TOKEN = "HF_TOKEN"
ENV_OBJECT_ENDPOINT = "AWS_ENDPOINT_URL_S3"
ENV_OBJECT_REGION = "AWS_REGION"

_STARTUP_PERIOD_SECONDS = 5
_HUNG_GRACE_SECONDS = 10
_PATIENCE_SECONDS = 60
"""For which a program may answer nothing before it is killed."""

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
class Volume:
    """A volume and the path where the main container mounts it."""

    name: str
    source: Manifest
    path: str
    read_only: bool = False
    sub_path: str = ""

    def build_mount(self) -> Manifest:
        options = ({"readOnly": True} if self.read_only else {}) | ({"subPath": self.sub_path} if self.sub_path else {})
        return {"name": self.name, "mountPath": self.path} | options


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
    config: Any
    """What the role reads at its start: a change replaces the Pods."""
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
    workload = common.build_child(api_version, kind, owner, name, parts.labels, spec=spec)
    return [
        common.build_child("v1", "Service", owner, name, parts.labels, spec=service),
        record_configuration(workload, configuration, read_scheduling(owner)),
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
    spec = _fill_resources(template["spec"], owner, parts) | {"restartPolicy": parts.restart_policy}
    spec |= _restrict_containers(spec) | _tolerate_lost_nodes(spec, owner, parts.role)
    spec = avoid_nodes(spec, find_avoided_nodes(owner, parts.role, parts.labels))
    return template | {"metadata": template["metadata"] | metadata, "spec": spec}


def _build_metadata(owner: Owner, parts: PodParts) -> Manifest:
    annotations = {common.ANNOTATION_CONFIG_HASH: common.digest(parts.config)} | parts.annotations
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


def _restrict_containers(spec: Manifest) -> Manifest:
    """The containers, also those of the template: none gets more than it asks for."""
    lists = {name: spec[name] for name in ("containers", "initContainers") if spec.get(name)}
    return {name: [_restrict(container) for container in containers] for name, containers in lists.items()}


def _restrict(container: Manifest) -> Manifest:
    own = container.get("securityContext") or {}
    if not isinstance(own, dict):
        return container  # the checks of Pod templates report it
    # The API server refuses a privileged container without privilege escalation.
    return container if own.get("privileged") else container | {"securityContext": UNPRIVILEGED | own}


def _fill_resources(spec: Manifest, owner: Owner, parts: PodParts) -> Manifest:
    """The Pod's spec with the default requests and limits of the containers that RLJob builds. What the job says about
    a resource, in `resources` or in the template, of the container or of the whole Pod, replaces both defaults."""
    defaults = parts.defaults.resources
    of_role = getattr(defaults, _resolve_role(parts.role))
    by_container = {parts.role: of_role, VLLM_CONTAINER: defaults.vllm}
    if isinstance(owner, RLJob) and owner.spec.scheduling.gang == "kueue":
        by_container = {name: _without_disk(resources) for name, resources in by_container.items()}
    lists = {name: spec[name] for name in ("containers", "initContainers") if spec.get(name)}
    whole = _as_mapping(spec.get("resources"))
    return spec | {
        name: [_fill(container, by_container.get(str(container.get("name"))), whole) for container in containers]
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


def _build_log_env(defaults: Defaults) -> list[Manifest]:
    return build_env({contract.ENV_LOG_FORMAT: defaults.log_format}) if defaults.log_format != "text" else []


def _build_container(parts: PodParts) -> Manifest:
    return {
        "name": parts.role,
        "image": parts.spec.image or parts.image,
        **pull_policy(parts.defaults),
        "command": parts.command,
        "env": override_env([*parts.env, *_build_log_env(parts.defaults)], parts.spec.env),
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


def build_token_env(secret_name: str) -> list[Manifest]:
    """The env of every container: the token of its job or RewardModel, and the Pod's address."""
    secret = {"name": secret_name, "key": TOKEN_KEY}
    return [
        {"name": contract.ENV_TOKEN, "valueFrom": {"secretKeyRef": secret}},
        build_field_env(contract.ENV_POD_IP, "status.podIP"),
    ]


def build_field_env(name: str, path: str) -> Manifest:
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def build_job_env(job: RLJob, *, run_dir: bool) -> list[Manifest]:
    """The env of the trainer image's containers: the job file, the head, the model, and the run folder."""
    env = {
        contract.ENV_JOB_FILE: f"{contract.PATH_CONFIG}/{contract.FILE_JOB}",
        contract.ENV_HEAD: common.child_name(job, common.HEAD),
        **list_model_env(job),
    } | ({contract.ENV_RUN_DIR: contract.PATH_RUN} if run_dir else {})
    sources = build_source_env(job.spec.hub, job.spec.object_storage)
    return build_token_env(common.child_name(job, "token")) + build_env(env) + sources


def build_grace_env(template: Mapping[str, Any]) -> list[Manifest]:
    """The grace period that the user's template sets: head and trainers save what fits in it."""
    seconds = (template.get("spec") or {}).get("terminationGracePeriodSeconds")
    return build_env({contract.ENV_GRACE_SECONDS: str(seconds)}) if isinstance(seconds, int) else []


def build_source_env(hub: Hub, storage: ObjectStorage) -> list[Manifest]:
    """How programs find what hf:// and s3:// sources name."""
    return _build_hub_env(hub) + _build_object_env(storage)


def _build_object_env(storage: ObjectStorage) -> list[Manifest]:
    """How botocore finds the storage and the credentials. Keys are optional: each storage has its own."""
    env = build_env({ENV_OBJECT_ENDPOINT: storage.endpoint} if storage.endpoint else {})
    env += build_env({ENV_OBJECT_REGION: storage.region} if storage.region else {})
    if storage.secret_ref:
        for name in OBJECT_VARIABLES:
            reference = {"name": storage.secret_ref.name, "key": name, "optional": True}
            env.append({"name": name, "valueFrom": {"secretKeyRef": reference}})
    return env


def _build_hub_env(hub: Hub) -> list[Manifest]:
    """How huggingface_hub, and so every library that reads models or datasets, finds the Hub and the token."""
    env = build_env({ENV_HUB_ENDPOINT: hub.endpoint} if hub.endpoint else {})
    if hub.token_secret_ref:
        env.append({"name": ENV_HUB_TOKEN, "valueFrom": {"secretKeyRef": hub.token_secret_ref.to_manifest()}})
    return env


def override_env(env: list[Manifest], overrides: dict[str, str]) -> list[Manifest]:
    """The env with the role's own. The API server rejects two entries of the same name."""
    return [entry for entry in env if entry["name"] not in overrides] + build_env(overrides)


def build_env(env: dict[str, str]) -> list[Manifest]:
    return [{"name": name, "value": value} for name, value in env.items()]


def build_root_security(defaults: Defaults) -> Manifest:
    """The part of a container's securityContext about its root file system. With build_home_volumes."""
    return {"readOnlyRootFilesystem": True} if defaults.read_only_root_filesystem else {}


def build_home_volumes(defaults: Defaults, name: str = "tmp") -> list[Volume]:
    """What a container with a read-only root writes to besides its other volumes. /tmp is HOME in the trainer image:
    caches of the Hub, vLLM, torch and triton, and the files of Ray are there."""
    return [Volume(name, {"emptyDir": {}}, "/tmp")] if defaults.read_only_root_filesystem else []


def build_job_volumes(job: RLJob, defaults: Defaults, sources: list[str], *, run_dir: bool) -> list[Volume]:
    """The volumes of the trainer image's containers: the job file, the run folder, shared memory, /tmp, and claims."""
    # The kubelet refreshes the file, so increased steps reach the driver.
    config = {"configMap": {"name": common.child_name(job, "config")}}
    run = _build_run_volume(job) if run_dir else None
    return [
        Volume("config", config, contract.PATH_CONFIG, read_only=True),
        *([run] if run else []),
        build_shm_volume(),
        *build_home_volumes(defaults),
        *build_claim_volumes(sources, run),
    ]


def _build_run_volume(job: RLJob) -> Volume:
    """Checkpoints and metrics: a folder with the job's name in the user's claim, else deleted with the Pod."""
    claim = job.spec.checkpoint.persistent_volume_claim
    if claim is None:
        return Volume("run", {"emptyDir": {}}, contract.PATH_RUN)
    source = {"persistentVolumeClaim": {"claimName": claim.claim_name}}
    return Volume("run", source, contract.PATH_RUN, sub_path=job.metadata.name)


def build_shm_volume() -> Volume:
    """Ray's object store and NCCL need more shared memory than the default of 64 MiB."""
    return Volume("shm", {"emptyDir": {"medium": "Memory"}}, "/dev/shm")


def build_claim_volumes(sources: list[str], run_volume: Volume | None = None) -> list[Volume]:
    """The claims of pvc:// sources. The claim of `run_volume` is mounted a second time from that volume: two volumes of
    the same claim are one mount for the kubelet, and the read-only one may win.

    Volume names are numbered because claim names may be longer. Volumes are read-only, not only their mounts, so that
    fsGroup never changes the owner of the user's data."""
    claims = sorted({parsed.claim for parsed in map(parse_source, sources) if parsed.kind == "pvc"})
    shared = (run_volume.source.get("persistentVolumeClaim") or {}).get("claimName") if run_volume else None
    volumes = []
    for index, claim in enumerate(claims):
        path = f"{contract.PATH_CLAIMS}/{claim}"
        if run_volume and claim == shared:
            volumes.append(Volume(run_volume.name, run_volume.source, path, read_only=True))
        else:
            source = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
            volumes.append(Volume(f"claim-{index}", source, path, read_only=True))
    return volumes


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
