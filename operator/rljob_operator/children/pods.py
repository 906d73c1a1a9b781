"""Pod templates: one shape for all roles, filled in by each role's module, the user's template merged over it last.

Invariants: the labels that selectors need survive every template; no Pod gets a service-account token; every container
runs unprivileged.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from rljob_api.manifest.base import Spec
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.roles import Role
from rljob_api.manifest.scorers import ServedModel
from rljob_api.manifest.sources import parse_source
from rljob_api.wire.contract import (
    ENV_HEAD,
    ENV_JOB_FILE,
    ENV_MODEL,
    ENV_POD_IP,
    ENV_RUN_DIR,
    ENV_TOKEN,
    FILE_JOB,
    LABEL_MANAGED_BY,
    LABEL_ROLE,
    MANAGED_BY,
    PATH_CLAIMS,
    PATH_CONFIG,
    PATH_RUN,
    UrlPath,
)
from rljob_operator.backend import Manifest
from rljob_operator.children.common import (
    ANNOTATION_CONFIG_HASH,
    ANNOTATION_JOB_UID,
    HEAD,
    Owner,
    child_name,
    digest,
)
from rljob_operator.children.gang import build_gang_metadata, build_gang_spec
from rljob_operator.children.merge import merge

TOKEN_KEY = "token"
UNPRIVILEGED_USER = 1000
GPU_RESOURCE = "nvidia.com/gpu"

POD_FIELDS = frozenset({"image", "resources", "nodePool", "env", "template", "backoffLimit", "replicas", "autoscaling"})
"""Fields of a role that shape its Pods but that no program reads from its configuration."""

KEEP_ANNOTATIONS = {
    # Moving a Pod of the training group to save a node costs every GPU the steps since the last checkpoint.
    # These stop autoscalers from doing so of their own accord, and do not stop an administrator's drain.
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}


@dataclass(frozen=True)
class Volume:
    """A volume and the one place where the main container mounts it."""

    name: str
    source: Manifest
    path: str
    read_only: bool = False
    sub_path: str = ""

    def build_volume(self) -> Manifest:
        return {"name": self.name} | self.source

    def build_mount(self) -> Manifest:
        mount: Manifest = {"name": self.name, "mountPath": self.path}
        if self.read_only:
            mount["readOnly"] = True
        if self.sub_path:
            mount["subPath"] = self.sub_path
        return mount


@dataclass(frozen=True)
class Sidecar:
    """A further container (an init container that restarts), and the volumes that it mounts."""

    container: Manifest
    volumes: list[Volume]


@dataclass(frozen=True)
class PodParts:
    """What a role's module says of its Pods."""

    role: str
    spec: Role
    spec_path: str
    """Where the role stands in the manifest, for errors: spec.rollout."""
    image: str
    command: list[str]
    labels: dict[str, str]
    config: Any
    """What the role reads at its start: the Pods roll when it changes."""
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
    """Sleep before SIGTERM, in which the Pod's address leaves its Service and requests in flight end."""
    sidecar: Sidecar | None = None
    """Starts before the main container and ends after it."""


def build_pod_template(owner: Owner, parts: PodParts) -> Manifest:
    """The whole template. A job's Pods start as a gang, a RewardModel's each for itself. Raises UserError when the
    user's partial one cannot be merged."""
    gang = build_gang_spec(owner) if isinstance(owner, RLJob) else {}
    template = {"metadata": _build_metadata(owner, parts), "spec": _build_spec(parts) | gang}
    template = merge(template, parts.spec.template, f"{parts.spec_path}.template")
    # What selectors and the lifecycle rest on is not the user's to change.
    metadata = template["metadata"]
    built = _build_metadata(owner, parts)
    metadata["labels"] = metadata.get("labels", {}) | built["labels"]
    metadata["annotations"] = metadata.get("annotations", {}) | built["annotations"]
    template["spec"] = template["spec"] | {"restartPolicy": parts.restart_policy}
    return template


def _build_labels(parts: PodParts) -> dict[str, str]:
    return parts.labels | {LABEL_MANAGED_BY: MANAGED_BY}


def _build_metadata(owner: Owner, parts: PodParts) -> Manifest:
    annotations = {ANNOTATION_CONFIG_HASH: digest(parts.config)} | parts.annotations
    if owner.metadata.uid:
        annotations[ANNOTATION_JOB_UID] = owner.metadata.uid
    labels, more = build_gang_metadata(owner) if isinstance(owner, RLJob) else ({}, {})
    return {"labels": _build_labels(parts) | labels, "annotations": annotations | more}


def _build_spec(parts: PodParts) -> Manifest:
    volumes = [*parts.volumes, *(parts.sidecar.volumes if parts.sidecar else [])]
    spec: Manifest = {
        "restartPolicy": parts.restart_policy,
        "terminationGracePeriodSeconds": parts.grace_seconds,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # vLLM and Ray would read some of those variables as their own settings
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": UNPRIVILEGED_USER,
            "runAsGroup": UNPRIVILEGED_USER,
            "fsGroup": UNPRIVILEGED_USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **({"initContainers": [parts.sidecar.container]} if parts.sidecar else {}),
        "containers": [_build_container(parts)],
        # By name: a volume may have two places.
        "volumes": list({volume.name: volume.build_volume() for volume in volumes}.values()),
    }
    pool = parts.spec.node_pool
    if pool.node_selector:
        spec["nodeSelector"] = dict(pool.node_selector)
    if pool.tolerations:
        spec["tolerations"] = [toleration.to_manifest() for toleration in pool.tolerations]
    if pool.exclusive:
        spec["affinity"] = {"podAntiAffinity": _build_exclusive(parts.role)}
    return spec


def _build_container(parts: PodParts) -> Manifest:
    return {
        "name": parts.role,
        "image": parts.spec.image or parts.image,
        "command": parts.command,
        "env": parts.env + [{"name": name, "value": value} for name, value in parts.spec.env.items()],
        "ports": [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in parts.ports.items()],
        **parts.probes,
        **({"lifecycle": {"preStop": {"sleep": {"seconds": parts.drain_seconds}}}} if parts.drain_seconds else {}),
        "resources": build_resources(parts.spec, parts.gpus),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        | parts.container_security,
        # A crash that writes no message is told by its last lines of log.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [volume.build_mount() for volume in parts.volumes],
    }


def build_resources(role: Role | ServedModel, gpus: int) -> Manifest:
    """Requests and limits as given; the GPUs are a limit, which Kubernetes takes as the request too."""
    limits = ({GPU_RESOURCE: str(gpus)} if gpus else {}) | _to_strings(role.resources.limits)
    requests = _to_strings(role.resources.requests)
    return ({"limits": limits} if limits else {}) | ({"requests": requests} if requests else {})


def _to_strings(quantities: Mapping[str, str | int | float]) -> dict[str, str]:
    return {name: str(quantity) for name, quantity in quantities.items()}


def _build_exclusive(role: str) -> Manifest:
    """Refuses nodes that run another role of any RLJob in any namespace. NotIn alone also means 'without the label'."""
    return {
        "requiredDuringSchedulingIgnoredDuringExecution": [
            {
                "labelSelector": {
                    "matchExpressions": [
                        {"key": LABEL_ROLE, "operator": "Exists"},
                        {"key": LABEL_ROLE, "operator": "NotIn", "values": [role]},
                    ]
                },
                "namespaceSelector": {},
                "topologyKey": "kubernetes.io/hostname",
            }
        ]
    }


def read_settings(spec: Spec, exclude: Collection[str] = ()) -> dict[str, Any]:
    """What the user set, by manifest name, to be digested. Defaults are left out, so that an operator that knows
    a new field restarts nothing."""
    settings = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return {name: value for name, value in settings.items() if name not in exclude}


def build_token_env(secret_name: str) -> list[Manifest]:
    """What every container gets: the token of its job or RewardModel, and the Pod's own address."""
    secret = {"name": secret_name, "key": TOKEN_KEY}
    return [
        {"name": ENV_TOKEN, "valueFrom": {"secretKeyRef": secret}},
        {"name": ENV_POD_IP, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}}},
    ]


def build_job_env(job: RLJob, *, run_dir: bool) -> list[Manifest]:
    """What the containers of the trainer image get: the job's file, the head, the model, and the run's folder."""
    env = {
        ENV_JOB_FILE: f"{PATH_CONFIG}/{FILE_JOB}",
        ENV_HEAD: child_name(job, HEAD),
        ENV_MODEL: parse_source(job.spec.model.source).container_path,
    } | ({ENV_RUN_DIR: PATH_RUN} if run_dir else {})
    return build_token_env(child_name(job, "token")) + build_env(env)


def build_env(env: dict[str, str]) -> list[Manifest]:
    return [{"name": name, "value": value} for name, value in env.items()]


def build_job_volume(job: RLJob) -> Volume:
    """The whole job as /etc/rljob/job.yaml. Kubernetes refreshes it in place, so raised steps reach the driver."""
    return Volume("config", {"configMap": {"name": child_name(job, "config")}}, PATH_CONFIG, read_only=True)


def build_run_volume(job: RLJob) -> Volume:
    """Checkpoints and metrics: a folder of the job's name in the user's claim, else gone with the Pod."""
    claim = job.spec.checkpoint.persistent_volume_claim
    if claim is None:
        return Volume("run", {"emptyDir": {}}, PATH_RUN)
    source = {"persistentVolumeClaim": {"claimName": claim.claim_name}}
    return Volume("run", source, PATH_RUN, sub_path=job.metadata.name)


def build_shm_volume() -> Volume:
    """Ray's object store and NCCL need more shared memory than a container's default of 64 MiB."""
    return Volume("shm", {"emptyDir": {"medium": "Memory"}}, "/dev/shm")


def build_claim_volumes(sources: list[str], run_volume: Volume | None = None) -> list[Volume]:
    """The claims of pvc:// sources, each once. A claim that `run_volume` has already is mounted once more from it: two
    volumes of one claim in a Pod are one mount for the kubelet, and the read-only one may win.

    Claim names may be longer than volume names, hence the numbers. Read-only as volumes too, not just as mounts, so
    that fsGroup never changes the owner of the user's data."""
    claims = sorted({parsed.claim for parsed in map(parse_source, sources) if parsed.kind == "pvc"})
    shared = (run_volume.source.get("persistentVolumeClaim") or {}).get("claimName") if run_volume else None
    volumes = []
    for index, claim in enumerate(claims):
        path = f"{PATH_CLAIMS}/{claim}"
        if run_volume and claim == shared:
            volumes.append(Volume(run_volume.name, run_volume.source, path, read_only=True))
        else:
            source = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
            volumes.append(Volume(f"claim-{index}", source, path, read_only=True))
    return volumes


def build_probes(port_name: str, startup_seconds: int, failure_threshold: int = 2) -> Manifest:
    """Readiness asks the program. Liveness asks only for the port: a rollout with old weights, or a reward
    server with a full queue, is unready but alive, and killing it would make things worse."""
    period_seconds = 5
    return {
        "startupProbe": {
            "tcpSocket": {"port": port_name},
            "periodSeconds": period_seconds,
            "failureThreshold": startup_seconds // period_seconds,
        },
        "livenessProbe": {"tcpSocket": {"port": port_name}, "periodSeconds": 10, "failureThreshold": 6},
        "readinessProbe": build_readiness(port_name) | {"failureThreshold": failure_threshold},
    }


def build_readiness(port_name: str) -> Manifest:
    return {
        "httpGet": {"path": str(UrlPath.READY), "port": port_name},
        "periodSeconds": 5,
        "timeoutSeconds": 3,
        "failureThreshold": 2,
    }
