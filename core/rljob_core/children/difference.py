"""Whether an observed object already contains a desired one, so that an apply would write nothing.

The API server adds defaults, and webhooks may add containers or variables: extra content does not count as drift. The
stamp finds content that is no longer desired. It is an annotation with the digest of the last applied manifest. What a
workload keeps over an upgrade counts as it was built, so that an upgrade writes nothing.
"""

from typing import Any

from rljob_api.quantity import parse_quantity
from rljob_core.backend import Manifest
from rljob_core.children.common import digest
from rljob_core.children.keep import without_kept_fields

ANNOTATION_STAMP = "rljob.dev/applied"
_LIST_KEYS = ("mountPath", "name", "uid")
"""Keys that identify items of lists of maps; the first that all items have. Extra items and order do not count."""
_QUANTITIES = ("requests", "limits")
_QUANTITY = ("sizeLimit", "divisor")
"""Quantities: of volumes, and of variables with a container's resources."""


def stamp(manifest: Manifest) -> Manifest:
    """The manifest with its digest as an annotation."""
    metadata = manifest["metadata"]
    annotations = metadata.get("annotations", {}) | {ANNOTATION_STAMP: digest(without_kept_fields(manifest))}
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
