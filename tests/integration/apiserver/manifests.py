"""Minimal manifests, and setting values at their paths. Pure."""

from __future__ import annotations

import copy
import itertools
from typing import Any

INLINE = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
MISSING: Any = object()
"""A value that removes the field."""


def smallest(kind: str = "RLJob", name: str = "smallest") -> dict[str, Any]:
    """Return a manifest with only the fields that have no default."""
    spec = {
        "RLJob": {
            "model": {"source": "hf://org/model"},
            "data": {"train": {"source": "hf://org/data"}},
            "rewards": [{"name": "correct", "function": {"inline": INLINE}}],
        },
        "RewardModel": {"function": {"inline": INLINE}},
    }[kind]
    return {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": kind,
        "metadata": {"name": name},
        "spec": copy.deepcopy(spec),
    }


def put(manifest: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return the manifest with `value` at a dotted path below spec (`0`: a list's first, possibly new entry)."""
    changed = copy.deepcopy(manifest)
    holder: Any = changed["spec"]
    parts = path.split(".")
    for part, following in itertools.pairwise(parts):
        holder = _step(holder, part, [] if following == "0" else {})
    last = parts[-1]
    if value is MISSING:
        del holder[last]
    elif last == "0":
        holder[:] = [value]
    else:
        holder[last] = value
    return changed


def _step(holder: Any, part: str, empty: Any) -> Any:
    if part != "0":
        return holder.setdefault(part, empty)
    if not holder:
        holder.append(empty)
    return holder[0]


def put_all(manifest: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    for path, value in changes.items():
        manifest = put(manifest, path, value)
    return manifest
