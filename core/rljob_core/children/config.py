"""The ConfigMaps and the Secret that the programs read.

Invariants: reading job.yaml back gives the same settings, including explicit nulls ('no gradient clipping'). The files
leave out fields with their default, and those that no program reads. A running role keeps its image over an upgrade of
the operator; it ignores what it does not know (`pod_files`).
"""

import base64
from collections.abc import Mapping
from typing import Any

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.pod_settings import POD_SETTINGS
from rljob_api.manifest.services.calls import CallService
from rljob_api.wire.contract import FILE_FUNCTION, FILE_JOB, FILE_SERVICE
from rljob_core.backend import Manifest, Owner
from rljob_core.children.common import build_child, child_name, to_yaml
from rljob_core.children.env import TOKEN_KEY
from rljob_core.children.service import HostedService

_NOT_READ_OF_ROLE: dict[str, Any] = {
    "backoff_window_seconds": True,
    "startup_timeout_seconds": True,
    "node_pool": {"gpu_resource": True, "topology": True},
}
_NOT_READ_OF_MODEL = {"startup_timeout_seconds": True}
_NOT_READ_OF_SERVICE: dict[str, Any] = {
    **_NOT_READ_OF_ROLE,
    "model": {**_NOT_READ_OF_MODEL, "model": _NOT_READ_OF_MODEL},  # of a reward, and of a user
    "judge": {"model": _NOT_READ_OF_MODEL},
    "teacher": {"model": _NOT_READ_OF_MODEL},
}
_NOT_READ_OF_CALLS: dict[str, Any] = {
    **_NOT_READ_OF_ROLE,
    **dict.fromkeys(("retries", "deadline_seconds"), True),  # the driver's
    "user_model": {"model": _NOT_READ_OF_MODEL},
}
_NOT_READ_OF_JOB: dict[str, Any] = {
    **dict.fromkeys((*POD_SETTINGS, "scheduling", "progress_deadline_seconds"), True),
    **dict.fromkeys(("head", "trainer", "rollout"), _NOT_READ_OF_ROLE),
    "rewards": {"__all__": _NOT_READ_OF_SERVICE},
    "agent": {"user": _NOT_READ_OF_SERVICE, "tools": {"__all__": _NOT_READ_OF_ROLE}, "runner": _NOT_READ_OF_ROLE},
}


def build_job_config(job: RLJob) -> Manifest:
    """ConfigMap NAME-config, with name and namespace only: other metadata changes with every write of the job."""
    # Without decided replicas, which no program reads: a scaling decision must not change the file.
    spec = job.spec.with_replicas({each.settings.name: 1 for each in job.spec.services if each.settings.autoscaling})
    # The trainer's program starts the engines of its Pod, and reads startupTimeoutSeconds.
    not_read: dict[str, Any] = {"rollout": {"backoff_window_seconds": True}} if spec.shares_trainer else {}
    if spec.models_in_trainer:
        not_read |= {"rewards": {"__all__": _NOT_READ_OF_ROLE}}
        not_read |= {"agent": _NOT_READ_OF_JOB["agent"] | {"user": _NOT_READ_OF_ROLE}}
    document: Manifest = {
        "apiVersion": job.api_version,
        "kind": job.kind,
        "metadata": {"name": job.metadata.name, "namespace": job.metadata.namespace},
        "spec": spec.to_manifest(exclude=_NOT_READ_OF_JOB | not_read, exclude_defaults=True),
    }
    if (start := job.status.start_model) and start.step is not None:  # a head without the run's files begins with it
        document["status"] = {"startModel": start.to_manifest()}
    return build_child("v1", "ConfigMap", job, child_name(job, "config"), {}, data={FILE_JOB: to_yaml(document)})


def build_service_config(service: HostedService) -> Manifest:
    """ConfigMap of a service. Source code in a user's ConfigMap is mounted from there."""
    settings = service.settings
    if settings.autoscaling:  # as in the job's file
        settings = settings.model_copy(update={"replicas": 1})
    not_read = _NOT_READ_OF_CALLS if isinstance(settings, CallService) else _NOT_READ_OF_SERVICE
    data = {FILE_SERVICE: to_yaml(settings.to_manifest(exclude=not_read, exclude_defaults=True))}
    if settings.function and settings.function.inline is not None:
        data[FILE_FUNCTION] = settings.function.inline
    return build_child("v1", "ConfigMap", service.owner, service.name, service.selector, data=data)


def build_token_secret(owner: Owner, name: str, token: str) -> Manifest:
    """Secret with the token. It is not immutable: a kubelet would keep that of an earlier owner with this name, as long
    as a Pod of it is on the node."""
    data = {TOKEN_KEY: base64.b64encode(token.encode()).decode()}
    return build_child("v1", "Secret", owner, name, {}, type="Opaque", data=data)


def build_clients_secret(job: RLJob, keys: Mapping[str, str]) -> Manifest:
    """Secret NAME-clients with the keys of a training service's clients, by their names."""
    data = {client: base64.b64encode(key.encode()).decode() for client, key in keys.items()}
    return build_child("v1", "Secret", job, child_name(job, "clients"), {}, type="Opaque", data=data)


def read_token(secret: Manifest | None) -> str | None:
    """The token in a Secret; None if it has none."""
    encoded = (secret or {}).get("data", {}).get(TOKEN_KEY)
    return base64.b64decode(encoded).decode() if encoded else None
