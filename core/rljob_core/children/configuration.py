"""The user's settings from which the workload of a role follows: a change rolls the role, an upgrade does not. Pure.

Invariants: settings have no defaults, so that a new field changes nothing; nothing here depends on the operator's code,
images or defaults; each setting that changes a workload's template is included. tests/data/configuration has them for
each role: a change of the result restarts the running jobs of all users.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from rljob_api.manifest.base import SINCE_START, Spec, yaml_fields
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.pod_settings import POD_SETTINGS
from rljob_api.manifest.roles import Role
from rljob_api.wire.contract import ANNOTATION_RESTART
from rljob_core.backend import Manifest, Owner
from rljob_core.children.common import HEAD, TRAINER, read_role_name

RETRY_FIELDS = frozenset({"backoffLimit", "backoffWindowSeconds"})
"""Fields of a role that only the operator's decisions read."""
_ROLE_FIELDS = yaml_fields(Role).keys() - RETRY_FIELDS
"""Fields of every role that shape its Pods."""


def read_settings(spec: Spec, exclude: Collection[str] = ()) -> dict[str, Any]:
    """The user's settings by manifest name, for a digest. Without defaults, so that an operator with a new field
    restarts nothing."""
    settings = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True, context=SINCE_START)
    return {name: value for name, value in settings.items() if name not in exclude}


def without(settings: Mapping[str, Any], paths: Iterable[str]) -> dict[str, Any]:
    """The settings without these fields, and without sections of which nothing is left."""
    left = dict(settings)
    for path in paths:
        name, _, inner = path.partition(".")
        section = left.pop(name, {})
        rest = without(section, [inner]) if inner else {}
        left |= {name: rest} if rest else {}
    return left


def read_configuration(
    owner: Owner, role: str, spec: Role, labels: dict[str, str], config: Any, *, uses_hub: bool
) -> Manifest:
    """`spec` has the role's fields, `labels` those of its Pods, `config` what its program reads at its start."""
    configuration: Manifest = {
        "config": config,
        "role": {name: value for name, value in read_settings(spec).items() if name in _ROLE_FIELDS},
        "pods": owner.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True, include=set(POD_SETTINGS)),
    }
    if isinstance(owner, RLJob) and uses_hub:
        configuration["hub"] = read_settings(owner.spec.hub)
        if storage := read_settings(owner.spec.object_storage):
            configuration["objectStorage"] = storage
    if isinstance(owner, RLJob) and role in (HEAD, TRAINER):
        configuration["claim"] = head_claim(owner) if role == HEAD else shared_claim(owner)
    if request := read_restart_request(owner, role, labels):
        configuration["restart"] = request
    if nodes := find_avoided_nodes(owner, role, labels):
        configuration["avoidedNodes"] = nodes
    return configuration


def head_claim(job: RLJob) -> str | None:
    """The claim with the run's files. None: they are deleted with the head's Pod."""
    claim = job.spec.checkpoint.persistent_volume_claim
    return claim.claim_name if claim else None


def shared_claim(job: RLJob) -> str | None:
    """The claim with the run's files, if the trainers mount it, too."""
    claim = job.spec.checkpoint.persistent_volume_claim
    return claim.claim_name if claim and claim.mounted_by == "all" else None


def read_restart_request(owner: Owner, role: str, labels: dict[str, str]) -> str:
    """The values of the annotations that request a restart of all roles, and of this one; empty without a request."""
    return read_restart(owner, read_role_name(labels, role))


def read_restart(owner: Owner, name: str) -> str:
    """The same by the role's name in the status."""
    values = (owner.metadata.annotations.get(key) for key in (ANNOTATION_RESTART, f"{ANNOTATION_RESTART}-{name}"))
    return " ".join(filter(None, values))


def find_avoided_nodes(owner: Owner, role: str, labels: dict[str, str]) -> list[str]:
    """The nodes on which no Pod of the role may start: those that the status has, until the next requested restart.

    A Kueue workload has one shape of Pods per role, so a Pod that avoids a node could not replace another one."""
    if not isinstance(owner, RLJob) or owner.spec.scheduling.gang == "kueue":
        return []
    name = read_role_name(labels, role)
    request = read_restart(owner, name)
    return [each.node for each in owner.status.avoided_nodes if (each.role, each.restart) == (name, request)]


def read_scheduling(owner: Owner) -> Manifest:
    """The settings from which the gang fields of all templates follow. A running job keeps these (`gang.keep_gang`)."""
    if not isinstance(owner, RLJob):
        return {}
    spec = owner.spec
    scheduling = read_settings(spec.scheduling, {"timeoutSeconds"})
    if spec.scheduling.gang != "kueue":
        return scheduling
    services = [None if each.settings.autoscaling else each.settings.replicas for each in spec.services]
    return scheduling | {"replicas": [spec.num_trainer_pods, spec.num_rollout_pods, *services]}
