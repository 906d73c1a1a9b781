"""The field of the user's manifest behind a location in a built Pod template.

Invariant: the answer is a field that the user wrote.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rljob_api.manifest.base import yaml_fields
from rljob_api.manifest.pod_settings import PodSettings
from rljob_api.manifest.roles import Role
from rljob_api.manifest.services.calls import CallService
from rljob_api.manifest.services.models import ServedModel
from rljob_api.manifest.services.reward import RewardBase
from rljob_api.read.documents import Location, format_path
from rljob_api.wire.contract import ENV_JUDGE_API_KEY, ENV_MODEL_API_KEY, ENV_OTLP_ENDPOINT, ENV_OTLP_HEADERS
from rljob_core.backend import Manifest
from rljob_core.children.merge import find_in_patch
from rljob_core.children.pods import VLLM_CONTAINER

_CONTAINER_LISTS = ("containers", "initContainers")
_POD_FIELDS = frozenset(yaml_fields(PodSettings))


@dataclass(frozen=True)
class RolePath:
    """One role with Pods, and its place in the manifest."""

    path: str
    role: Role
    container: str
    """Name of the role's main container."""


def find_origin(role: RolePath, template: Manifest, location: Location) -> str | None:
    """Return the path of the user's field that a location of the merged template comes from; None if none is known."""
    found = find_in_patch(template, role.role.template, location)
    if len(found) >= min(len(location), _count_needed(role, template, location)):
        return f"{role.path}.template.{format_path((*found, *location[len(found) :]))}"
    return next(_fields_behind(role, template, location), None)


def _count_needed(role: RolePath, template: Manifest, location: Location) -> int:
    """How much of a location the user's template must have to be its origin: spec.FIELD, its own container, or a
    field of a container that the operator builds."""
    if len(location) < 3 or location[1] not in _CONTAINER_LISTS:
        return 2
    is_built = template["spec"][location[1]][location[2]].get("name") in (role.container, VLLM_CONTAINER)
    return 4 if is_built else 3


def _fields_behind(role: RolePath, template: Manifest, location: Location) -> Iterator[str]:
    part = location[1] if len(location) > 1 else ""
    if part in ("nodeSelector", "tolerations"):
        yield f"{role.path}.nodePool.{format_path(location[1:])}"
    elif part in _POD_FIELDS:
        yield f"spec.{format_path(location[1:])}"
    elif location[:2] == ("metadata", "labels"):
        yield "spec.scheduling.queue"
    elif part in _CONTAINER_LISTS and len(location) > 3:
        container = template["spec"][part][location[2]]
        yield from _container_fields(role, container, location[3:])


def _container_fields(role: RolePath, container: Manifest, inner: Location) -> Iterator[str]:
    is_main = container.get("name") == role.container
    service = role.role if isinstance(role.role, RewardBase | CallService) else None
    if inner[0] == "env" and len(inner) > 1 and (is_main or container.get("name") == VLLM_CONTAINER):
        name = container["env"][inner[1]].get("name")
        if name in role.role.env:
            yield f"{role.path}.env.{name}"
        elif name.startswith(ENV_MODEL_API_KEY):
            index = name.removeprefix(ENV_MODEL_API_KEY)
            yield f"spec.agent.models[{index}].apiKeySecretRef.{inner[-1]}"
        elif name in (ENV_OTLP_ENDPOINT, ENV_OTLP_HEADERS):
            field = "endpoint" if name == ENV_OTLP_ENDPOINT else f"headersSecretRef.{inner[-1]}"
            yield f"spec.tracing.{field}"
        elif name == ENV_JUDGE_API_KEY and service:
            yield f"{role.path}.{service.kind}.endpoint.apiKeySecretRef.{inner[-1]}"
    holder: Role | ServedModel | None = role.role
    path = role.path
    if not is_main:
        holder = service.served_model if service else None
        path += f".{service.served_model_field}" if service else ""
    if holder is not None and inner[0] in ("resources", "image"):
        yield f"{path}.{_resource_field(holder, inner, role.role.node_pool.gpu_resource)}"


def _resource_field(holder: Any, inner: Location, gpu_resource: str) -> str:
    is_generated = inner[0] == "resources" and inner[-1] == gpu_resource and inner[-1] not in holder.resources.requests
    if is_generated and inner[-1] not in holder.resources.limits:
        return "gpusPerReplica"
    return format_path(inner)
