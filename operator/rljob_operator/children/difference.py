"""Whether an observed object already says all that a desired one does, so that an apply would write nothing.

The API server adds defaults, and others may add containers or variables: extra content is no difference. What we no
longer want is found by the stamp, a digest of the last applied manifest that travels in an annotation.
"""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import Any

from rljob_operator.backend import Manifest
from rljob_operator.children.common import digest

ANNOTATION_STAMP = "rljob.dev/applied"
_LIST_KEYS = ("mountPath", "name", "uid")
"""By which lists of maps are compared, first that all items have: extra items are no difference, nor is order."""
_QUANTITIES = ("requests", "limits")
"""Fields that hold quantities by name."""
_QUANTITY = ("sizeLimit", "divisor")
"""Fields that are one: of volumes, and of variables that tell a container's resources."""
_SUFFIXES = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "": Decimal(1),
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate(("k", "M", "G", "T", "P", "E"), 1)},
    **{suffix: Decimal(1024) ** power for power, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), 1)},
}


def stamp(manifest: Manifest) -> Manifest:
    """The manifest with the digest of its content."""
    metadata = manifest["metadata"]
    annotations = metadata.get("annotations", {}) | {ANNOTATION_STAMP: digest(manifest)}
    return manifest | {"metadata": metadata | {"annotations": annotations}}


def is_stamped(observed: Manifest, desired: Manifest) -> bool:
    """Whether this very manifest was what we applied last."""
    annotations = observed["metadata"].get("annotations") or {}
    return bool(annotations.get(ANNOTATION_STAMP) == digest(desired))


def contains(observed: Any, desired: Any) -> bool:
    """Whether `observed` holds everything that `desired` says."""
    if observed == desired:  # most parts, below those that the API server adds to, and quick
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
    """Quantities by value: the API server writes 0.5 as 500m."""
    if str(observed) == str(desired):
        return True
    first, second = parse_quantity(observed), parse_quantity(desired)
    return first is not None and first == second


def parse_quantity(quantity: Any) -> Decimal | None:
    """The value of a Kubernetes quantity; None when it is none."""
    text = str(quantity).strip()
    number = text.rstrip("numkKMGTPEi")
    factor = _SUFFIXES.get(text[len(number) :])
    try:
        return Decimal(number) * factor if factor is not None else None
    except InvalidOperation:
        return None
