"""Small pure readers of Kubernetes manifests that the local backend's parts share."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from typing import Any

Manifest = dict[str, Any]


def name_of(manifest: Manifest) -> str:
    return str(manifest["metadata"]["name"])


def namespace_of(manifest: Manifest) -> str:
    return str(manifest["metadata"].get("namespace") or "default")


def labels_of(manifest: Manifest) -> dict[str, str]:
    return dict(manifest["metadata"].get("labels") or {})


def matches(selector: dict[str, str], manifest: Manifest) -> bool:
    """Whether an equality selector matches the object's labels. An empty selector matches nothing, as in a Service."""
    labels = labels_of(manifest)
    return bool(selector) and all(labels.get(key) == value for key, value in selector.items())


def is_ready(pod: Manifest) -> bool:
    """The Pod's Ready condition, and that it is not being deleted."""
    conditions = pod.get("status", {}).get("conditions", [])
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
    return ready and not is_terminating(pod)


def is_terminating(pod: Manifest) -> bool:
    return bool(pod["metadata"].get("deletionTimestamp"))


def phase_of(pod: Manifest) -> str:
    return str(pod.get("status", {}).get("phase") or "Pending")


def is_sidecar(container: Manifest) -> bool:
    """Of an init container: whether it keeps running beside the main ones (Kubernetes' native sidecars)."""
    return container.get("restartPolicy") == "Always"


def owner_of(pod: Manifest) -> tuple[str, str] | None:
    """(kind, name) of the controller that owns the Pod."""
    for owner in pod["metadata"].get("ownerReferences", []):
        if owner.get("controller"):
            return owner["kind"], owner["name"]
    return None


def digest(value: Any, length: int = 10) -> str:
    """A short name for a value: equal values, equal names."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def timestamp(moment: datetime) -> str:
    """RFC 3339 with microseconds: local restarts are quicker than a second."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse_timestamp(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))
