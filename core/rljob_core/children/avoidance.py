"""The node affinity that keeps Pods from nodes with a broken GPU. Pure.

Invariant: what the user's template requires of a node stays required.
"""

from collections.abc import Sequence
from typing import Any

from rljob_core.backend import Manifest

_HOSTNAME = "kubernetes.io/hostname"
"""The node's name, unless its kubelet has another host name."""
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def avoid_nodes(spec: Manifest, nodes: Sequence[str]) -> Manifest:
    """The spec of a Pod that is not scheduled to `nodes`. Terms of a node selector are alternatives, so that each gets
    the requirement."""
    if not nodes:
        return spec
    affinity = _as_mapping(spec.get("affinity"))
    node_affinity = _as_mapping(affinity.get("nodeAffinity"))
    required = _as_mapping(node_affinity.get(_REQUIRED))
    added: Manifest = {"key": _HOSTNAME, "operator": "NotIn", "values": sorted(nodes)}
    terms = [_as_mapping(term) for term in required.get("nodeSelectorTerms") or [{}]]
    terms = [term | {"matchExpressions": [*(term.get("matchExpressions") or []), added]} for term in terms]
    node_affinity = node_affinity | {_REQUIRED: required | {"nodeSelectorTerms": terms}}
    return spec | {"affinity": affinity | {"nodeAffinity": node_affinity}}


def avoided_by(spec: Manifest) -> list[str]:
    """The nodes to which the spec of a Pod allows no scheduling by its name."""
    required = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(_REQUIRED) or {}
    expressions = [
        each for term in required.get("nodeSelectorTerms") or [] for each in term.get("matchExpressions") or []
    ]
    by_name = [each for each in expressions if (each["key"], each["operator"]) == (_HOSTNAME, "NotIn")]
    return sorted({node for each in by_name for node in each["values"]})


def _as_mapping(value: Any) -> Manifest:
    return value if isinstance(value, dict) else {}
