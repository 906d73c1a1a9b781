"""Images as an OCI layout without the layers that containerd has unpacked already.

A changed source is a layer of some kilobytes above one of 7 GB: importing the whole archive would write, hash and drop
all of it on every node. Here the blobs of unpacked layers are named, and left out.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_OCI = "application/vnd.oci.image"


@dataclass(frozen=True)
class Layer:
    diff_id: str
    size: int
    open: Callable[[], IO[bytes]]
    """Its uncompressed tar; asked for only where it is needed."""


@dataclass(frozen=True)
class Image:
    names: Sequence[str]
    """As Pods name it, with its registry."""
    config: bytes
    layers: Sequence[Layer]

    def find_new(self, unpacked: Collection[str]) -> list[Layer]:
        chains = chain_ids([layer.diff_id for layer in self.layers])
        return [layer for layer, chain in zip(self.layers, chains, strict=True) if chain not in unpacked]


def chain_ids(diff_ids: Sequence[str]) -> list[str]:
    """The names of an image's snapshots, the lowest first: each covers its layer and all below it."""
    chain: list[str] = []
    for diff_id in diff_ids:
        text = f"{chain[-1]} {diff_id}" if chain else ""
        chain.append(f"sha256:{hashlib.sha256(text.encode()).hexdigest()}" if text else diff_id)
    return chain


@contextlib.contextmanager
def read_archive(archive: Path) -> Iterator[list[Image]]:
    """The images of an uncompressed docker-archive, while it is open."""
    with tarfile.open(archive) as source:
        yield [_read_image(source, entry) for entry in json.loads(_read(source, "manifest.json"))]


def write_layout(images: Iterable[Image], unpacked: Collection[str], target: IO[bytes]) -> None:
    """Write images to a stream, without the layers whose snapshots are in `unpacked`."""
    manifests: list[dict[str, Any]] = []
    with tarfile.open(fileobj=target, mode="w|") as out:
        for image in images:
            for layer in image.find_new(unpacked):
                with layer.open() as content:
                    _add(out, _blob(layer.diff_id), content, layer.size)
            descriptor = _write(out, f"{_OCI}.manifest.v1+json", json.dumps(_build_manifest(out, image)).encode())
            manifests += [descriptor | {"annotations": {"io.containerd.image.name": name}} for name in image.names]
        _add_bytes(out, "oci-layout", json.dumps({"imageLayoutVersion": "1.0.0"}).encode())
        _add_bytes(out, "index.json", json.dumps({"schemaVersion": 2, "manifests": manifests}).encode())


def _read_image(source: tarfile.TarFile, entry: dict[str, Any]) -> Image:
    config = _read(source, entry["Config"])
    layers = []
    for name, diff_id in zip(entry["Layers"], json.loads(config)["rootfs"]["diff_ids"], strict=True):
        with _open(source, name) as content:
            size = content.seek(0, io.SEEK_END)
        layers.append(Layer(diff_id, size, lambda name=name: _open(source, name)))  # type: ignore[misc]
    return Image([_qualify(tag) for tag in entry["RepoTags"]], config, layers)


def _qualify(tag: str) -> str:
    """Without a registry means docker.io, which docker's own archives leave out."""
    host = tag.split("/")[0]
    return tag if "." in host or ":" in host or host == "localhost" else f"docker.io/{tag}"


def _build_manifest(out: tarfile.TarFile, image: Image) -> dict[str, Any]:
    return {
        "schemaVersion": 2,
        "mediaType": f"{_OCI}.manifest.v1+json",
        "config": _write(out, f"{_OCI}.config.v1+json", image.config),
        "layers": [
            {"mediaType": f"{_OCI}.layer.v1.tar", "digest": layer.diff_id, "size": layer.size} for layer in image.layers
        ],
    }


def _write(out: tarfile.TarFile, media_type: str, content: bytes) -> dict[str, Any]:
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    _add_bytes(out, _blob(digest), content)
    return {"mediaType": media_type, "digest": digest, "size": len(content)}


def _blob(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def _add_bytes(out: tarfile.TarFile, name: str, content: bytes) -> None:
    _add(out, name, io.BytesIO(content), len(content))


def _add(out: tarfile.TarFile, name: str, content: IO[bytes], size: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = size
    out.addfile(entry, content)


def _open(source: tarfile.TarFile, name: str) -> IO[bytes]:
    found = source.extractfile(name)
    if found is None:
        raise tarfile.TarError(f"{source.name!s} names {name}, which is no file of it")
    return found


def _read(source: tarfile.TarFile, name: str) -> bytes:
    with _open(source, name) as file:
        return file.read()
