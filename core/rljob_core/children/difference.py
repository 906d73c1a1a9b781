"""Whether an observed object already contains a desired one, so that an apply would write nothing.

The API server adds defaults, and webhooks may add containers or variables: extra content does not count as drift. The
stamp finds content that is no longer desired. It is an annotation with the digest of the last applied manifest. What a
workload keeps over an upgrade counts as it was built, so that an upgrade writes nothing.

Admission may change an applied manifest: policies may rewrite images, labels or resources in the operator's own
requests, and a value that it would set back they would only rewrite again.

The API server keeps in metadata.managedFields who set a field last. It computes them before admission, so a field that
a policy rewrote in the operator's request, or in any later one, stays the operator's, and a field that someone else
edited or removed does not. Invariant: only a field that the operator owns and still wants as it applied it keeps its
observed value; an edit by others is set back.
"""

import json
from collections.abc import Iterator
from typing import Any

from rljob_api.quantity import parse_quantity
from rljob_api.wire.contract import MANAGED_BY
from rljob_core.backend import Manifest
from rljob_core.children import keep
from rljob_core.children.common import digest

ANNOTATION_STAMP = "rljob.dev/applied"
_LIST_KEYS = ("mountPath", "name", "uid")
"""Keys that identify items of lists of maps; the first that all items have. Extra items and order do not count."""
_QUANTITIES = ("requests", "limits")
_QUANTITY = ("sizeLimit", "divisor")
"""Quantities: of volumes, and of variables with a container's resources."""


def stamp(manifest: Manifest) -> Manifest:
    """The manifest with its digest as an annotation: of a workload, without what `keep` has the digest of."""
    metadata, kept = manifest["metadata"], keep.kept_fields(manifest)
    rest = {"spec": {name: value for name, value in manifest["spec"].items() if name not in kept}} if kept else {}
    annotations = metadata.get("annotations", {}) | {ANNOTATION_STAMP: digest(manifest | rest)}
    return manifest | {"metadata": metadata | {"annotations": annotations}}


def contains(observed: Any, desired: Any) -> bool:
    if observed == desired:  # fast, and true of most parts
        return True
    if isinstance(desired, dict):
        if not isinstance(observed, dict):
            return observed is None and not desired
        return all(_contains_field(observed.get(name), value, name) for name, value in desired.items())
    if isinstance(desired, list):
        return _contains_list(observed or [], desired)
    return observed is None and (desired is False or desired == "")


def _contains_field(observed: Any, desired: Any, name: str) -> bool:
    if name in _QUANTITIES and isinstance(desired, dict) and isinstance(observed, dict):
        return all(_equal_quantities(observed.get(key), value) for key, value in desired.items())
    return contains(observed, desired) or (name in _QUANTITY and _equal_quantities(observed, desired))


def _contains_list(observed: Any, desired: list[Any]) -> bool:
    if not isinstance(observed, list):
        return False
    key = next((k for k in _LIST_KEYS if all(isinstance(i, dict) and k in i for i in [*observed, *desired])), None)
    if key is None:
        return len(observed) == len(desired) and all(map(contains, observed, desired))
    by_key = {item[key]: item for item in observed}
    return all(contains(by_key.get(item[key]), item) for item in desired)


def _equal_quantities(observed: Any, desired: Any) -> bool:
    """Compare by value: the API server writes 0.5 as 500m."""
    wanted = parse_quantity(desired)
    return str(observed) == str(desired) or (wanted is not None and parse_quantity(observed) == wanted)


_ABSENT: Any = object()


def find_own_entry(managed_fields: list[Manifest]) -> Manifest | None:
    """The entry of the operator's applies; those of subresources are not about what it applies."""
    own = (each for each in managed_fields if each.get("manager") == MANAGED_BY and each.get("operation") == "Apply")
    return next((each for each in own if not each.get("subresource")), None)


def keep_admitted(desired: Manifest, observed: Manifest | None) -> Manifest:
    """The stamped manifest `desired`, which `observed` does not contain, with the values that admission gave to the
    fields of an equal one, applied before.

    Of a workload that differs in other fields, what runs in its Pods may still be equal.
    """
    if observed is None:
        return desired
    is_workload, is_equal = desired["kind"] in keep.KINDS, _stamp_of(desired) == _stamp_of(observed)
    has_equal_pods = is_workload and not keep.is_outdated(desired, observed)
    if desired["kind"] == "Job" and has_equal_pods:
        # What is immutable was not edited since, and an apply of other fields must repeat it.
        desired = desired | {"spec": desired["spec"] | keep.kept_fields(observed)}
    entry = find_own_entry(observed["metadata"].get("managedFields") or [])
    owned: Manifest = entry["fieldsV1"] if entry else {}
    if is_equal:
        kept: Manifest = _keep_map(desired, observed, owned)
        return kept
    if not has_equal_pods:
        return desired
    pods = _keep_map(keep.kept_fields(desired), observed["spec"], owned.get("f:spec", {}))
    return desired | {"spec": desired["spec"] | pods}


def _stamp_of(manifest: Manifest) -> str | None:
    return (manifest["metadata"].get("annotations") or {}).get(ANNOTATION_STAMP)


def _keep(desired: Any, observed: Any, owned: Manifest) -> Any:
    """`desired` with the observed values of the fields in `owned`, a node of FieldsV1; {} is a whole value."""
    if observed is not _ABSENT and contains(observed, desired):
        return desired
    if not owned:
        return observed
    if isinstance(desired, dict):
        return _keep_map(desired, observed if isinstance(observed, dict) else {}, owned)
    if isinstance(desired, list):
        return list(_keep_items(desired, observed if isinstance(observed, list) else [], owned))
    return desired


def _keep_map(desired: Manifest, observed: Manifest, owned: Manifest) -> Manifest:
    fields = {
        name: value if (field := owned.get(f"f:{name}")) is None else _keep(value, observed.get(name, _ABSENT), field)
        for name, value in desired.items()
    }
    return {name: value for name, value in fields.items() if value is not _ABSENT}


def _keep_items(desired: list[Any], observed: list[Any], owned: Manifest) -> Iterator[Any]:
    for item in desired:
        field, found = _find_item(item, observed, owned)
        kept = item if field is None else _keep(item, found, field)
        if kept is not _ABSENT and found is not _ABSENT:
            yield kept


def _find_item(item: Any, observed: list[Any], owned: Manifest) -> tuple[Manifest | None, Any]:
    """The node of FieldsV1 of an item of a list, and the observed item. None: it is not owned."""
    for name, field in owned.items():
        kind, _, text = name.partition(":")
        if kind == "v" and json.loads(text) == item:
            return field, item if item in observed else _ABSENT
        if kind == "k" and isinstance(item, dict):
            key = json.loads(text)  # with the defaults of the fields that the item leaves out
            if all(item.get(part, value) == value for part, value in key.items()):
                same = (each for each in observed if all(each.get(part) == value for part, value in key.items()))
                return field, next(same, _ABSENT)
    return None, item
