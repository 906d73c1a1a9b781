"""Images in buildah's own store, whose layers a containerd on the same disk can use as hard links.

Both keep a layer as an immutable folder for overlayfs, so that 8 GB are neither exported nor unpacked. Owns what is
known about the files of the store (containers/storage). If anything is unexpected, an archive is needed.
"""

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
    """The folder of each layer, lowest first."""


def find_image(name: str, near: Path) -> StoredImage | None:
    """Return the image, or None if its layers cannot be hard-linked to `near`."""
    root = _find_root()
    if root is None or not near.exists() or root.stat().st_dev != near.stat().st_dev:
        return None
    for entry in _load(root / "overlay-images/images.json"):
        if f"localhost/{name}" in (entry.get("names") or []):
            return _read_image(root, entry, name)
    return None


@functools.cache
def _find_root() -> Path | None:
    """The folder of buildah's layers; None if the store does not keep them as plain folders."""
    if not shutil.which("buildah"):
        return None
    done = subprocess.run(["buildah", "info"], capture_output=True, text=True)
    store = json.loads(done.stdout).get("store", {}) if done.returncode == 0 else {}
    is_plain = str(store.get("GraphStatus", {}).get("Using metacopy", "false")) == "false"
    return Path(store["GraphRoot"]) if store.get("GraphDriverName") == "overlay" and is_plain else None


def _read_image(root: Path, entry: dict[str, Any], name: str) -> StoredImage | None:
    # containers/storage encodes keys in base64 if they contain other characters than a-z, 0-9, . and -.
    encoded = base64.b64encode(f"sha256:{entry['id']}".encode()).decode()
    config = (root / "overlay-images" / entry["id"] / f"={encoded}").read_bytes()
    by_id = {layer["id"]: layer for layer in _load(root / "overlay-layers/layers.json")}
    layers: list[dict[str, Any]] = []
    next_id = entry.get("layer")
    while next_id:
        layers.insert(0, by_id[next_id])
        next_id = by_id[next_id].get("parent")
    diff_ids = json.loads(config)["rootfs"]["diff_ids"]
    if [layer.get("diff-digest") for layer in layers] != diff_ids:
        return None
    image_layers = [Layer(layer["diff-digest"], layer["diff-size"], _reject_reading) for layer in layers]
    folders = tuple(root / "overlay" / layer["id"] / "diff" for layer in layers)
    return StoredImage(entry["id"], Image([f"docker.io/{name}"], config, image_layers), folders)


def _reject_reading() -> IO[bytes]:
    raise AssertionError("layers of buildah's store are linked, not read")


def _load(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text())) if path.exists() else []
