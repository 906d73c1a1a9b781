"""Secrets and ConfigMaps that a Pod cannot start without. Pure.

Left out: optional references; pull Secrets, without which the kubelet tries to pull; and, by their names, what the
operator itself creates for the owner and for RewardModels.
"""

from collections.abc import Iterator
from typing import Any

from rljob_core.backend import Manifest, Reference
from rljob_core.children import reward_refs

_SECRET, _CONFIG_MAP = "Secret", "ConfigMap"


def find_references(workload: Manifest) -> list[Reference]:
    """Return what the Pods of a workload need and the operator does not create, each once."""
    (owner,) = workload["metadata"]["ownerReferences"]
    found = dict.fromkeys(_list_references(workload["spec"]["template"]["spec"]))
    return [each for each in found if each.name and not _is_created_by_operator(each.name, owner["name"])]


def _is_created_by_operator(name: str, owner: str) -> bool:
    return name.startswith(f"{owner}-") or name.endswith(reward_refs.child_name(""))


def _list_references(spec: Manifest) -> Iterator[Reference]:
    for container in (*spec.get("initContainers", ()), *spec.get("containers", ())):
        for variable in container.get("env") or ():
            source = variable.get("valueFrom") or {}
            yield from _read(source, "secretKeyRef", "configMapKeyRef")
        for source in container.get("envFrom") or ():
            yield from _read(source, "secretRef", "configMapRef")
    for volume in spec.get("volumes") or ():
        yield from _read(volume, "secret", "configMap")
        for source in (volume.get("projected") or {}).get("sources") or ():
            yield from _read(source, "secret", "configMap")


def _read(holder: Manifest, secret: str, config_map: str) -> Iterator[Reference]:
    for kind, field in ((_SECRET, secret), (_CONFIG_MAP, config_map)):
        source: Any = holder.get(field)
        if source and not source.get("optional"):
            yield Reference(kind, source.get("secretName") or source.get("name") or "")
