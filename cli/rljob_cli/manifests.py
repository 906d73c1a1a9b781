"""Small pure readers of Kubernetes manifests."""

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from rljob_core.backend import Manifest
from rljob_core.children.common import read_role_name
from rljob_core.plan import observed_job
from rljob_core.plan.observed_job import is_terminating


def namespace_of(manifest: Manifest) -> str:
    return str(manifest["metadata"].get("namespace") or "default")


def labels_of(manifest: Manifest) -> dict[str, str]:
    return dict(manifest["metadata"].get("labels") or {})


def containers_of(pod: Mapping[str, Any]) -> list[Manifest]:
    """Return the containers of a Pod's spec, those that run first included."""
    return [*(pod.get("initContainers") or []), *pod["containers"]]


def role_of(pod: Manifest) -> str:
    """head, trainer, rollout, reward-NAME or agent-NAME."""
    return read_role_name(labels_of(pod))


def is_ready(pod: Manifest) -> bool:
    return observed_job.is_ready(pod) and not is_terminating(pod)


def phase_of(pod: Manifest) -> str:
    return str(pod.get("status", {}).get("phase") or "Pending")


def is_sidecar(container: Manifest) -> bool:
    """Whether an init container keeps running next to the main ones (a native sidecar)."""
    return container.get("restartPolicy") == "Always"


def owner_of(pod: Manifest) -> tuple[str, str] | None:
    for owner in pod["metadata"].get("ownerReferences", []):
        if owner.get("controller"):
            return owner["kind"], owner["name"]
    return None


def digest(value: Any, length: int = 10) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def timestamp(moment: datetime) -> str:
    """RFC 3339 with microseconds, since local restarts take less than a second."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
