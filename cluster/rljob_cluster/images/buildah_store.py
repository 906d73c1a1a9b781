"""Images as they lie in buildah's own store, whose layers a containerd on the same disk can take as hard links.

Both keep a layer as a folder for overlayfs that never changes, so 8 GB need neither be exported nor unpacked. Owns what
is known of the store's files (containers/storage); whatever is not as expected means that an archive is needed.
"""

from __future__ import annotations

import base64
import functools
import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rljob_cluster.images.oci_layout import Image, Layer


@dataclass(frozen=True)
class StoredImage:
    id: str
    image: Image
    folders: tuple[Path, ...]
    """One a layer, the lowest first."""


def find_image(name: str, near: Path) -> StoredImage | None:
    """The image of that name, where its layers can be hard-linked to `near`."""
    root = _find_root()
    if root is None or not near.exists() or root.stat().st_dev != near.stat().st_dev:
        return None
    found = (entry for entry in _load(root / "overlay-images/images.json") if f"localhost/{name}" in _names(entry))
    return next((_read_image(root, entry, name) for entry in found), None)


@functools.cache
def _find_root() -> Path | None:
    """Where buildah's layers lie as plain folders; None where it has no such store."""
    if not shutil.which("buildah"):
        return None
    done = subprocess.run(["buildah", "info"], capture_output=True, text=True)
    store = json.loads(done.stdout).get("store", {}) if done.returncode == 0 else {}
    is_plain = str(store.get("GraphStatus", {}).get("Using metacopy", "false")) == "false"
    return Path(store["GraphRoot"]) if store.get("GraphDriverName") == "overlay" and is_plain else None


def _read_image(root: Path, entry: dict[str, Any], name: str) -> StoredImage | None:
    config = (root / "overlay-images" / entry["id"] / _file_name(f"sha256:{entry['id']}")).read_bytes()
    by_id = {layer["id"]: layer for layer in _load(root / "overlay-layers/layers.json")}
    layers: list[dict[str, Any]] = []
    next_id = entry.get("layer")
    while next_id:
        layers.insert(0, by_id[next_id])
        next_id = by_id[next_id].get("parent")
    diff_ids = json.loads(config)["rootfs"]["diff_ids"]
    if [layer.get("diff-digest") for layer in layers] != diff_ids:
        return None
    return StoredImage(
        entry["id"],
        Image(
            [f"docker.io/{name}"], config, [Layer(layer["diff-digest"], layer["diff-size"], _none) for layer in layers]
        ),
        tuple(root / "overlay" / layer["id"] / "diff" for layer in layers),
    )


def _none() -> IO[bytes]:
    raise AssertionError("a layer of buildah's store is linked, never read")


def _file_name(key: str) -> str:
    """containers/storage writes keys with other letters than a-z, 0-9, . and - in base64."""
    return "=" + base64.b64encode(key.encode()).decode()


def _names(entry: dict[str, Any]) -> list[str]:
    return entry.get("names") or []


def _load(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text())) if path.exists() else []
