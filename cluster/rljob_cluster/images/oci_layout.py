"""Writes images as an OCI layout without the layers that containerd has already unpacked.

A changed source is a layer of some kilobytes above one of 7 GB. Importing a complete archive would write, hash and drop
all of it on every node. The layout names the blobs of unpacked layers, and leaves out their content.
"""

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
    """Opens its uncompressed tar."""


@dataclass(frozen=True)
class Image:
    names: Sequence[str]
    """As Pods name it, with the registry."""
    config: bytes
    layers: Sequence[Layer]

    def find_new(self, unpacked: Collection[str]) -> list[Layer]:
        chains = chain_ids([layer.diff_id for layer in self.layers])
        return [layer for layer, chain in zip(self.layers, chains, strict=True) if chain not in unpacked]


def chain_ids(diff_ids: Sequence[str]) -> list[str]:
    """The names of an image's snapshots, lowest first: each covers its layer and all layers below."""
    chain: list[str] = []
    for diff_id in diff_ids:
        chain.append(_sha256(f"{chain[-1]} {diff_id}".encode()) if chain else diff_id)
    return chain


@contextlib.contextmanager
def read_archive(archive: Path) -> Iterator[list[Image]]:
    """Read the images of an uncompressed docker-archive; their layers can be opened inside the `with` block."""
    with tarfile.open(archive) as source:
        yield [_read_image(source, entry) for entry in json.loads(_read(source, "manifest.json"))]


def write_layout(images: Iterable[Image], unpacked: Collection[str], target: IO[bytes]) -> None:
    """Write images to a stream, without the layers whose snapshots are in `unpacked`."""
    manifests: list[dict[str, Any]] = []
    with tarfile.open(fileobj=target, mode="w|") as out:
        for image in images:
            for layer in image.find_new(unpacked):
                with layer.open() as content:
                    _add_file(out, _blob(layer.diff_id), content, layer.size)
            descriptor = _add_blob(out, "manifest.v1+json", json.dumps(_build_manifest(out, image)).encode())
            manifests += [descriptor | {"annotations": {"io.containerd.image.name": name}} for name in image.names]
        _add_bytes(out, "oci-layout", json.dumps({"imageLayoutVersion": "1.0.0"}).encode())
        _add_bytes(out, "index.json", json.dumps({"schemaVersion": 2, "manifests": manifests}).encode())


def build_program_image(program: Path, name: str) -> Image:
    """An image that contains one static program only; `name` is the full reference."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        _add_bytes(tar, program.name, program.read_bytes(), mode=0o755)
    layer = content.getvalue()
    diff_id = _sha256(layer)
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": [f"/{program.name}"], "User": "65532:65532"},
        "rootfs": {"type": "layers", "diff_ids": [diff_id]},
    }
    return Image([name], json.dumps(config).encode(), [Layer(diff_id, len(layer), lambda: io.BytesIO(layer))])


def _add_bytes(out: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    _add_file(out, name, io.BytesIO(content), len(content), mode)


def _add_file(out: tarfile.TarFile, name: str, content: IO[bytes], size: int, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = size, mode
    out.addfile(entry, content)


def _read_image(source: tarfile.TarFile, entry: dict[str, Any]) -> Image:
    config = _read(source, entry["Config"])
    layers = []
    for name, diff_id in zip(entry["Layers"], json.loads(config)["rootfs"]["diff_ids"], strict=True):
        with _open(source, name) as content:
            size = content.seek(0, io.SEEK_END)
        layers.append(Layer(diff_id, size, lambda name=name: _open(source, name)))  # type: ignore[misc]
    return Image([_qualify(tag) for tag in entry["RepoTags"]], config, layers)


def _qualify(tag: str) -> str:
    """Add docker.io where the registry is missing, as in docker's own archives."""
    host = tag.split("/")[0]
    return tag if "." in host or ":" in host or host == "localhost" else f"docker.io/{tag}"


def _build_manifest(out: tarfile.TarFile, image: Image) -> dict[str, Any]:
    return {
        "schemaVersion": 2,
        "mediaType": f"{_OCI}.manifest.v1+json",
        "config": _add_blob(out, "config.v1+json", image.config),
        "layers": [
            {"mediaType": f"{_OCI}.layer.v1.tar", "digest": layer.diff_id, "size": layer.size} for layer in image.layers
        ],
    }


def _add_blob(out: tarfile.TarFile, media_type: str, content: bytes) -> dict[str, Any]:
    digest = _sha256(content)
    _add_bytes(out, _blob(digest), content)
    return {"mediaType": f"{_OCI}.{media_type}", "digest": digest, "size": len(content)}


def _sha256(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _blob(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def _open(source: tarfile.TarFile, name: str) -> IO[bytes]:
    found = source.extractfile(name)
    if found is None:
        raise tarfile.TarError(f"{source.name!s}: {name} is not a file")
    return found


def _read(source: tarfile.TarFile, name: str) -> bytes:
    with _open(source, name) as file:
        return file.read()
