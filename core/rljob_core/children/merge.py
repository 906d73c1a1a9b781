"""Strategic merge of a user's partial Pod template into the built one.

Maps merge by key and null deletes one, as in Kubernetes' strategic merge patch. Lists merge by the key that Kubernetes
merges them by; those in _APPENDED grow; every other list (command, args) is replaced whole.
"""

from typing import Any

from rljob_api.errors import UserError
from rljob_api.read.documents import Location
from rljob_core.backend import Manifest

_MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "resourceClaims": "name",
}
_REPLACED = ("volumes", "env")
"""Lists with items that replace others whole: the API server rejects `value` together with `valueFrom`."""
_APPENDED = {
    "tolerations",
    "envFrom",
    "topologySpreadConstraints",
    "requiredDuringSchedulingIgnoredDuringExecution",
    "preferredDuringSchedulingIgnoredDuringExecution",
    "schedulingGates",
}
LISTS_OF_MAPPINGS = frozenset({*_MERGE_KEYS, *_APPENDED})


def merge(base: Manifest, patch: Manifest, path: str) -> Manifest:
    """`base` with `patch` merged in; both stay unchanged. `path` is the path of the patch, for errors."""
    if not isinstance(patch, dict):
        raise UserError(f"{path} must be a mapping, got {type(patch).__name__}")
    merged = dict(base)
    for key, value in patch.items():
        where = f"{path}.{key}"
        if value is None:
            merged.pop(key, None)
        elif isinstance(merged.get(key), dict):
            merged[key] = merge(merged[key], value, where)
        elif key in _MERGE_KEYS or key in _APPENDED:
            merged[key] = _merge_list(key, merged.get(key) or [], value, where)
        else:
            merged[key] = value
    return merged


def _merge_list(key: str, base: list[Any], patch: Any, path: str) -> list[Any]:
    if not isinstance(patch, list):
        raise UserError(f"{path} must be a list, got {type(patch).__name__}")
    if key in _APPENDED:
        return base + [item for item in patch if item not in base]
    merge_key = _MERGE_KEYS[key]
    merged = list(base)
    for index, item in enumerate(patch):
        where = f"{path}[{index}]"
        if not isinstance(item, dict) or merge_key not in item:
            raise UserError(f"{where} must be a mapping with {merge_key}, by which it is merged")
        place = next((i for i, old in enumerate(merged) if old[merge_key] == item[merge_key]), None)
        if place is None:
            merged.append(item)
        else:
            merged[place] = item if key in _REPLACED else merge(merged[place], item, where)
    return merged


def find_in_patch(merged: Any, patch: Any, location: Location) -> Location:
    """Return where `patch` has what is at a location in `merged`, in the patch's own indices; as deep as it has it."""
    found: list[str | int] = []
    key: str | int = ""
    for part in location:
        merged = merged[part] if _has(merged, part) else None
        inner: str | int | None = part
        if isinstance(part, int):
            inner = _find_item(str(key), patch, part, merged) if isinstance(patch, list) else None
        if inner is None or not _has(patch, inner):
            break
        found.append(inner)
        patch, key = patch[inner], part
    return tuple(found)


def _has(holder: Any, part: str | int) -> bool:
    if isinstance(holder, dict):
        return part in holder
    return isinstance(holder, list) and isinstance(part, int) and part < len(holder)


def _find_item(key: str, patch: list[Any], index: int, item: Any) -> int | None:
    if key in _APPENDED:
        return next((place for place, own in enumerate(patch) if own == item), None)
    if key not in _MERGE_KEYS:
        return index
    name = _MERGE_KEYS[key]
    named = [own.get(name) if isinstance(own, dict) else None for own in patch]
    value = item.get(name) if isinstance(item, dict) else None
    return named.index(value) if value in named else None
