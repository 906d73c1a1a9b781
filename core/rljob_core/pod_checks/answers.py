"""The location in an applied manifest that a path in the API server's answer means. Pure.

It writes paths in three ways: `spec.containers[0].image`, `.spec.containers[name="a"].image` and
`spec.containers[0].resources.limits[nvidia.com/gpu]`. Invariant: each part but the last exists in the manifest, so a
path that cannot be resolved gives the location of what holds it.
"""

import json
import re
from typing import Any

from rljob_api.read.documents import Location
from rljob_core.backend import Manifest

_PART = re.compile(r'\[(?P<selector>(?:"(?:[^"\\]|\\.)*"|[^\]"])*)\]|\.?(?P<name>[^.\[\]]+)')
_KEYS = re.compile(r'(?P<key>\w+)=(?P<value>"(?:[^"\\]|\\.)*"|[^,]+)')
_TEMPLATE_METADATA = re.compile(r"^spec\.template\.(labels|annotations)\b")
"""The API server leaves out `metadata` here."""


def find_location(manifest: Manifest, path: str) -> Location:
    """Return the keys and indices of `path` in `manifest`."""
    path = _TEMPLATE_METADATA.sub(r"spec.template.metadata.\1", path.lstrip("."))
    location: list[str | int] = []
    value: Any = manifest
    for match in _PART.finditer(path):
        part = match["name"] if match["name"] is not None else _select(value, match["selector"])
        if isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
        elif isinstance(value, dict) and isinstance(part, str):
            value = value.get(part)
        else:
            break
        location.append(part)
    return tuple(location)


def _select(value: Any, selector: str) -> str | int | None:
    """The key, or the index of the item that the selector names; None if there is none."""
    if not isinstance(value, list):
        return selector
    if selector.isdigit():
        return int(selector)
    wanted = {match["key"]: _read(match["value"]) for match in _KEYS.finditer(selector)}
    # A key with a default may be missing in the manifest.
    fits = (index for index, item in enumerate(value) if isinstance(item, dict) and _has(item, wanted))
    return next(fits, None) if wanted else None


def _has(item: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return all(item.get(key, value) == value for key, value in wanted.items())


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
