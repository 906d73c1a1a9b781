"""What all children share: names, labels, owner references, and the digests whose change replaces Pods.

Leaves Pods to `pods`, and each role to the module of its name. Invariant: a child's name and selector depend on the
job's name only, so the same job always owns the same objects.
"""

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import yaml

from rljob_api import API_VERSION, __version__
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.job_spec import Service
from rljob_api.read import documents
from rljob_api.wire import contract
from rljob_core.backend import Manifest, Owner
from rljob_core.defaults import image_tag

WORKLOAD_KINDS = ("Job", "StatefulSet", "Deployment")
"""Children with Pods of a role."""
SANDBOX_TEMPLATE, SANDBOX_POOL = "SandboxTemplate", "SandboxWarmPool"
POD_KINDS = (*WORKLOAD_KINDS, SANDBOX_TEMPLATE, SANDBOX_POOL)
"""Children with Pods. Deleted while a job is suspended, while its gang backs off, and after its end. The others use no
resources and stay."""

DISRUPTION_CONDITIONS = ("DisruptionTarget", "TerminationTarget")
"""Conditions of Pods, set before they are evicted or deleted: by Kubernetes, by Kueue. The reason names the cause."""

HEAD = "head"
TRAINER = "trainer"
ROLLOUT = "rollout"
REWARD = "reward"
AGENT = "agent"
"""The Pods of the simulated user, of the tools, and of the runner."""
SERVING = (REWARD, AGENT)
"""The roles with a name: one per service of the job. They run rljob_service, and user code in it."""
_MAX_SUFFIX = 22
_SHARED = "shared"
"""Component of children that belong to no role, such as the token."""
_NAME_LABELS = {REWARD: contract.LABEL_REWARD, AGENT: contract.LABEL_AGENT}

LABEL_AVOIDS = "rljob.dev/avoids"
"""On Pods of a role with a topology: digest of the nodes that they avoid."""
ANNOTATION_CONFIG_HASH = "rljob.dev/config-hash"
"""On Pod templates: digest of what the role reads at its start alone. Pods are replaced only when that changes."""
ANNOTATION_RESTARTED = "rljob.dev/restarted"
"""On Pod templates: the request (`kubectl rljob restart`) for which the Pods were last replaced."""
ANNOTATION_JOB_UID = "rljob.dev/job-uid"
"""On Pods: uid of their owner. Pods of a deleted owner with the same name are ignored."""


def child_name(owner: Owner, suffix: str) -> str:
    """A DNS label: a job's name has at most 40 characters. A longer suffix, or one with `_`, ends with a digest."""
    if len(suffix) > _MAX_SUFFIX or "_" in suffix:
        suffix = f"{suffix[: _MAX_SUFFIX - 6].replace('_', '-')}-{hashlib.sha256(suffix.encode()).hexdigest()[:5]}"
    return f"{owner.metadata.name}-{suffix}"


def role_of_service(service: Service) -> str:
    return REWARD if service.kind == "reward" else AGENT


def service_name(job: RLJob, service: Service) -> str:
    """JOB-reward-NAME, JOB-agent-NAME."""
    return child_name(job, f"{role_of_service(service)}-{service.settings.name}")


def build_selector(job: RLJob, role: str, name: str = "") -> dict[str, str]:
    """The labels of a role's Pods; with a name, of one service's."""
    return {contract.LABEL_JOB: job.metadata.name} | build_role_labels(role, name)


def build_role_labels(role: str, name: str = "") -> dict[str, str]:
    return {contract.LABEL_ROLE: role} | ({_NAME_LABELS[role]: name} if name else {})


def read_role_name(labels: Mapping[str, str], role: str = "") -> str:
    """The role's name in the status, from the labels of a child: head, reward-correct, agent-user. `role` replaces the
    label of the role."""
    role = role or labels.get(contract.LABEL_ROLE) or ""
    name = labels.get(_NAME_LABELS.get(role, ""))
    return f"{role}-{name}" if name else role


def read_service_name(labels: Mapping[str, str]) -> str:
    """The name of the reward, simulated user, tool or runner that a child belongs to; empty for other roles."""
    return labels.get(_NAME_LABELS.get(labels.get(contract.LABEL_ROLE, ""), ""), "")


def build_child(
    api_version: str, kind: str, owner: Owner, name: str, labels: dict[str, str], **fields: Any
) -> Manifest:
    """A child with the content `fields`. Without a uid its owner was never stored: no owner reference."""
    label = contract.LABEL_JOB if isinstance(owner, RLJob) else contract.LABEL_REWARD_MODEL
    metadata: Manifest = {
        "name": name,
        "namespace": owner.metadata.namespace,
        "labels": build_app_labels(owner, labels, has_pods=kind in WORKLOAD_KINDS)
        | {label: owner.metadata.name, contract.LABEL_MANAGED_BY: contract.MANAGED_BY}
        | labels,
    }
    if owner.metadata.uid:
        metadata["ownerReferences"] = [
            {
                "apiVersion": API_VERSION,
                "kind": owner.kind,
                "name": owner.metadata.name,
                "uid": owner.metadata.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ]
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **fields}


def build_app_labels(owner: Owner, labels: Mapping[str, str], *, has_pods: bool) -> dict[str, str]:
    """The labels that Kubernetes recommends, for a child, or for the Pods of a workload. Only what has Pods has a
    version: an upgrade of the operator would otherwise write every child of every job."""
    found = {
        "name": contract.APP_NAME,
        "instance": owner.metadata.name,
        "component": labels.get(contract.LABEL_ROLE, _SHARED),
        "part-of": contract.APP_NAME,
    }
    version = {contract.LABEL_VERSION: image_tag(__version__)} if has_pods else {}
    return {f"{contract.APP_LABEL}{name}": value for name, value in found.items()} | version


def digest(value: Any) -> str:
    """Short digest of plain data, the same for equal data in every process."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_NUM_CACHED_TEXTS = 256
"""Each reconcile writes a job's file twice, and the text seldom changes."""
# libyaml is several times as fast. Some builds of PyYAML lack it.
_BaseDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Dumper(_BaseDumper):
    """Writes multi-line strings as blocks, so that a function's source in a ConfigMap is readable, and quotes what
    kubectl would not read as text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_str(dumper: Any, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None if documents.is_text(value) else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _represent_str)


def to_yaml(value: Any) -> str:
    """Plain data as YAML that kubectl reads back as it is; keys keep their order."""
    return _to_yaml(json.dumps(value))


@lru_cache(maxsize=_NUM_CACHED_TEXTS)
def _to_yaml(value: str) -> str:
    return yaml.dump(json.loads(value), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
