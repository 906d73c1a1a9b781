"""The sandboxes of a tool with provider agentSandbox: a template and a warm pool of kubernetes-sigs/agent-sandbox.

The tool's Pods claim a sandbox for each episode (rljob_service.worker.code.agent_sandbox). They alone have a
service-account token, which may create, read and delete SandboxClaims and read the pool. A sandbox runs what the model
writes, so it gets the least: no token of Kubernetes, no network, a read-only root, bounded disk. Invariant: claims
belong to the pool, so no sandbox of a job remains when its pool is deleted.
"""

import base64
import hashlib
import hmac
import json
from typing import Any

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.pod_settings import POD_SETTINGS
from rljob_api.manifest.services.sandbox import Sandbox
from rljob_api.wire import contract
from rljob_core.backend import Manifest
from rljob_core.children import pods
from rljob_core.children.common import build_child
from rljob_core.children.configuration import read_settings
from rljob_core.children.env import build_field_env
from rljob_core.children.keep import record_configuration
from rljob_core.children.service import HostedService
from rljob_core.children.volumes import Volume
from rljob_core.defaults import Defaults

API_VERSION = "extensions.agents.x-k8s.io/v1beta1"
SANDBOX = "sandbox"
"""Role of the Pods, and their container's name. They have no label managed-by: the operator does not watch them."""
_MAX_WARM = 64
_DISK = "ephemeral-storage"
_RESOURCES: Manifest = {
    "requests": {"cpu": "250m", "memory": "512Mi", _DISK: "1Gi"},
    "limits": {"cpu": "1", "memory": "512Mi", _DISK: "1Gi"},
}
_SECURITY: Manifest = {**pods.UNPRIVILEGED, "readOnlyRootFilesystem": True}
_SERVER_MODULE = "rljob_service.worker.code.sandbox_server"
_WORK, _SERVER_FOLDER = "/workspace", "/opt/rljob"
_GRACE_SECONDS = 1
"""A sandbox has nothing to save."""
_MARGIN_SECONDS = 600.0
"""After the longest time of an episode, the cluster deletes a claim that its driver has not given back."""


def find_sandbox_labels(service: HostedService) -> dict[str, str]:
    """The labels of the Pods of a tool's sandboxes."""
    return service.selector | {contract.LABEL_ROLE: SANDBOX}


def build_sandboxes(job: RLJob, service: HostedService, token: str, defaults: Defaults) -> list[Manifest]:
    """All that a tool with provider agentSandbox has besides its Deployment; empty for other services."""
    if service.sandbox is None:
        return []
    return [
        _build_secret(job, service, token),
        *_build_account(job, service),
        _build_policy(job, service),
        _build_template(job, service, service.sandbox, defaults),
        _build_pool(job, service, service.sandbox),
    ]


def _build(job: RLJob, service: HostedService, api_version: str, kind: str, name: str = "", **fields: Any) -> Manifest:
    return build_child(api_version, kind, job, name or service.name, service.selector, **fields)


def _build_secret(job: RLJob, service: HostedService, token: str) -> Manifest:
    """What the tool's workers read, and the sandboxes' own token: the code in them must not learn the job's."""
    own = hmac.new(token.encode(), service.name.encode(), hashlib.sha256).hexdigest()
    seconds = job.spec.agent.episode_seconds + _MARGIN_SECONDS
    settings = {"pool": service.name, "port": contract.PORT_SANDBOX, "token": own, "seconds": seconds}
    values = {contract.FILE_SANDBOX: json.dumps(settings), contract.KEY_SANDBOX_TOKEN: own}
    data = {name: base64.b64encode(value.encode()).decode() for name, value in values.items()}
    return _build(job, service, "v1", "Secret", service.sandbox_secret, type="Opaque", data=data)


def _build_account(job: RLJob, service: HostedService) -> list[Manifest]:
    group, _, _ = API_VERSION.partition("/")
    rules = [
        {"apiGroups": [group], "resources": ["sandboxclaims"], "verbs": ["create", "get", "delete"]},
        {"apiGroups": [group], "resources": ["sandboxwarmpools"], "verbs": ["get"], "resourceNames": [service.name]},
    ]
    subject = {"kind": "ServiceAccount", "name": service.name, "namespace": job.metadata.namespace}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": service.name}
    rbac = "rbac.authorization.k8s.io/v1"
    return [
        _build(job, service, "v1", "ServiceAccount", automountServiceAccountToken=False),
        _build(job, service, rbac, "Role", rules=rules),
        _build(job, service, rbac, "RoleBinding", roleRef=role, subjects=[subject]),
    ]


def _build_policy(job: RLJob, service: HostedService) -> Manifest:
    """The tool's Pods may call the sandboxes, which may call nothing, not even DNS."""
    port = {"protocol": "TCP", "port": contract.PORT_SANDBOX}
    spec = {
        "podSelector": {"matchLabels": find_sandbox_labels(service)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": [{"podSelector": {"matchLabels": service.selector}}], "ports": [port]}],
        "egress": [],
    }
    return _build(job, service, "networking.k8s.io/v1", "NetworkPolicy", f"{service.name}-{SANDBOX}", spec=spec)


def count_episodes(job: RLJob) -> int:
    """The episodes of one step. Each claims a sandbox."""
    return job.spec.schedule.prompts_per_step * job.spec.algorithm.group_size


def _build_pool(job: RLJob, service: HostedService, sandbox: Sandbox) -> Manifest:
    """Without replicas while the tool has none."""
    warm = min(_MAX_WARM, count_episodes(job)) if sandbox.warm_replicas is None else sandbox.warm_replicas
    pool: Manifest = {
        "replicas": warm if service.settings.replicas else 0,
        "sandboxTemplateRef": {"name": service.name},
        "updateStrategy": {"type": "Recreate"},  # no episode starts with an earlier image
    }
    return _build(job, service, API_VERSION, "SandboxWarmPool", spec=pool)


def _build_template(job: RLJob, service: HostedService, sandbox: Sandbox, defaults: Defaults) -> Manifest:
    metadata = {"labels": defaults.labels | find_sandbox_labels(service), "annotations": defaults.annotations}
    spec = {
        "podTemplate": {"metadata": metadata, "spec": _build_pod_spec(job, service, sandbox, defaults)},
        "networkPolicyManagement": "Unmanaged",  # ours exists before the first Pod
        "service": False,
    }
    template = _build(job, service, API_VERSION, "SandboxTemplate", spec=spec)
    shared = job.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True, include=set(POD_SETTINGS))
    pool = read_settings(service.settings.node_pool)
    return record_configuration(template, {"sandbox": read_settings(sandbox), "pods": shared, "pool": pool}, {}, {})


def _build_pod_spec(job: RLJob, service: HostedService, sandbox: Sandbox, defaults: Defaults) -> Manifest:
    resources = _build_resources(sandbox)
    disk: Manifest = {"sizeLimit": resources["limits"].get(_DISK, defaults.reward_scratch_size)}
    server = [Volume("server", {"emptyDir": {}}, _SERVER_FOLDER)] if sandbox.image else []
    volumes = [Volume("work", {"emptyDir": disk}, _WORK), Volume("tmp", {"emptyDir": disk}, "/tmp"), *server]
    settings = pods.build_settings(job, defaults) | pods.build_placement(
        service.settings.node_pool, defaults, service.role
    )
    return {
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": defaults.pod_security_context.to_manifest(),
        **settings,
        **({"runtimeClassName": sandbox.runtime_class_name} if sandbox.runtime_class_name else {}),
        **({"initContainers": [_build_copy(server, resources, defaults)]} if sandbox.image else {}),
        "containers": [_build_container(service, sandbox, volumes, resources, defaults)],
        "volumes": [{"name": volume.name} | volume.source for volume in volumes],
    }


def _build_container(
    service: HostedService, sandbox: Sandbox, volumes: list[Volume], resources: Manifest, defaults: Defaults
) -> Manifest:
    own = ["python3", f"{_SERVER_FOLDER}/server.py"]
    start = own if sandbox.image else ["python", "-m", _SERVER_MODULE]
    key = {"name": service.sandbox_secret, "key": contract.KEY_SANDBOX_TOKEN}
    return {
        "name": SANDBOX,
        "image": sandbox.image or defaults.reward_image,
        **pods.pull_policy(defaults),
        "command": [*start, str(contract.PORT_SANDBOX), _WORK],
        "env": [
            {"name": contract.ENV_SANDBOX_TOKEN, "valueFrom": {"secretKeyRef": key}},
            build_field_env(contract.ENV_POD_IP, "status.podIP"),
        ],
        "ports": [{"name": "http", "containerPort": contract.PORT_SANDBOX, "protocol": "TCP"}],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": "http"}, "periodSeconds": 1, "failureThreshold": 10},
        "resources": resources,
        "securityContext": _SECURITY,
        "volumeMounts": [volume.build_mount() for volume in volumes],
    }


def _build_copy(volumes: list[Volume], resources: Manifest, defaults: Defaults) -> Manifest:
    """Copies the server into another image's Pod."""
    return {
        "name": "copy-server",
        "image": defaults.reward_image,
        **pods.pull_policy(defaults),
        "command": ["python", "-m", _SERVER_MODULE, "--copy", f"{_SERVER_FOLDER}/server.py"],
        "resources": resources,
        "securityContext": _SECURITY,
        "volumeMounts": [volume.build_mount() for volume in volumes],
    }


def _build_resources(sandbox: Sandbox) -> Manifest:
    """The default of a resource applies unless the job requests or limits it."""
    own = sandbox.resources
    given = {kind: getattr(own, kind) if own else {} for kind in ("requests", "limits")}
    named = {name for quantities in given.values() for name in quantities}
    return {
        kind: {name: value for name, value in _RESOURCES[kind].items() if name not in named}
        | {name: str(value) for name, value in given[kind].items()}
        for kind in ("requests", "limits")
    }
