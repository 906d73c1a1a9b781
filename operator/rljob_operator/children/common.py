"""What every child has in common: its name, labels, owner, and the digests that decide whether Pods must roll.

Owns naming and metadata. Leaves Pods to `pods`, and each role's shape to the module of its name.
Invariant: a child's name and selector follow from the job's name alone, so the same job always owns the same objects.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from typing import Any

import yaml

from rljob_api import API_VERSION
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.reward import Reward
from rljob_api.wire.contract import (
    LABEL_JOB,
    LABEL_MANAGED_BY,
    LABEL_REWARD,
    LABEL_REWARD_MODEL,
    LABEL_ROLE,
    MANAGED_BY,
)
from rljob_operator.backend import Manifest, Owner

WORKLOAD_KINDS = ("Job", "StatefulSet", "Deployment")
"""Children that have Pods. All else costs nothing, and stays while a job is suspended and after its end."""

HEAD = "head"
TRAINER = "trainer"
ROLLOUT = "rollout"
REWARD = "reward"

ANNOTATION_CONFIG_HASH = "rljob.dev/config-hash"
"""On Pod templates: digest of what the role reads at its start. It changes, and Pods roll, only when that does."""
ANNOTATION_JOB_UID = "rljob.dev/job-uid"
"""On Pods: which incarnation of their owner they belong to. A Pod of a deleted one of the same name says nothing."""


def child_name(owner: Owner, suffix: str) -> str:
    return f"{owner.metadata.name}-{suffix}"


def reward_name(job: RLJob, reward: Reward) -> str:
    """Name of a reward's Deployment, Service and ConfigMap."""
    return child_name(job, f"{REWARD}-{reward.name}")


def build_selector(job: RLJob, role: str, reward: Reward | None = None) -> dict[str, str]:
    """Labels that find the Pods of a role."""
    labels = {LABEL_JOB: job.metadata.name, LABEL_ROLE: role}
    return labels | ({LABEL_REWARD: reward.name} if reward else {})


def build_metadata(owner: Owner, name: str, labels: dict[str, str] | None = None) -> Manifest:
    """Metadata of a child. Without a uid (an owner that no API server has seen) there is nothing to refer to."""
    label = LABEL_JOB if isinstance(owner, RLJob) else LABEL_REWARD_MODEL
    metadata: Manifest = {
        "name": name,
        "namespace": owner.metadata.namespace,
        "labels": {label: owner.metadata.name, LABEL_MANAGED_BY: MANAGED_BY} | (labels or {}),
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
    return metadata


def build_headless_service(
    owner: Owner, name: str, selector: dict[str, str], ports: dict[str, int], *, publish_not_ready: bool
) -> Manifest:
    """A Service whose name resolves to the addresses of its Pods (ready ones, unless publish_not_ready)."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": build_metadata(owner, name, selector),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": publish_not_ready,
            "selector": selector,
            "ports": [
                {"name": port_name, "port": port, "targetPort": port_name, "protocol": "TCP"}
                for port_name, port in ports.items()
            ],
        },
    }


def digest(value: Any) -> str:
    """Short digest of plain data, the same for equal data in every process."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_NUM_TEXTS_KEPT = 256
"""A job's file is written twice a look, and is the same from look to look."""
# libyaml's writer is several times as fast. Builds of PyYAML may lack it.
_BaseDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Dumper(_BaseDumper):
    """Writes strings of several lines as blocks, so that a function's source in a ConfigMap can be read."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_str(dumper: Any, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _represent_str)


def to_yaml(value: Any) -> str:
    """Plain data as YAML, keys in their order."""
    return _to_yaml(json.dumps(value))


@lru_cache(maxsize=_NUM_TEXTS_KEPT)
def _to_yaml(value: str) -> str:
    return yaml.dump(json.loads(value), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
