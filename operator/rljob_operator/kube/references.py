"""Secrets and ConfigMaps that a Pod cannot start without. Pure.

Left out: optional references; pull Secrets, without which the kubelet tries to pull; by their names, what the operator
itself creates for the owner and for RewardModels; and all Secrets of a Pod with a CSI volume of its own. The Secrets
Store CSI driver creates a Secret (secretObjects) when the first Pod mounts its volume, and never without that Pod.
"""

from collections.abc import Iterator
from typing import Any

from rljob_core.backend import Manifest, Reference
from rljob_core.children import reward_refs

_SECRET, _CONFIG_MAP = "Secret", "ConfigMap"


def find_references(workload: Manifest) -> list[Reference]:
    """Return what the Pods of a workload need and the operator does not create, each once."""
    (owner,) = workload["metadata"]["ownerReferences"]
    spec = workload["spec"]["template"].get("spec")
    left_out = {_SECRET} if any(volume.get("csi") for volume in _list(spec, "volumes")) else set[str]()
    found = [each for each in dict.fromkeys(_list_references(spec)) if each.name and each.kind not in left_out]
    return [each for each in found if not _is_created_by_operator(each.name, owner["name"])]


def _is_created_by_operator(name: str, owner: str) -> bool:
    return name.startswith(f"{owner}-") or name.endswith(reward_refs.child_name(""))


def _list_references(spec: Any) -> Iterator[Reference]:
    for container in (*_list(spec, "initContainers"), *_list(spec, "containers")):
        for variable in _list(container, "env"):
            yield from _read(variable.get("valueFrom"), "secretKeyRef", "configMapKeyRef")
        for source in _list(container, "envFrom"):
            yield from _read(source, "secretRef", "configMapRef")
    for volume in _list(spec, "volumes"):
        yield from _read(volume, "secret", "configMap")
        for source in _list(volume.get("projected"), "sources"):
            yield from _read(source, "secret", "configMap")


def _list(holder: Any, field: str) -> list[Manifest]:
    """Return the mappings of a list. What has another type is the API server's to refuse."""
    entries = holder.get(field) if isinstance(holder, dict) else None
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def _read(holder: Any, secret: str, config_map: str) -> Iterator[Reference]:
    for kind, field in ((_SECRET, secret), (_CONFIG_MAP, config_map)):
        source = holder.get(field) if isinstance(holder, dict) else None
        if isinstance(source, dict) and not source.get("optional"):
            name = source.get("secretName") or source.get("name")
            yield Reference(kind, name if isinstance(name, str) else "")
