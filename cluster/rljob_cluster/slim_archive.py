"""Gives containerd an image archive without the layers that it has unpacked already.

A changed source is a layer of some kilobytes above one of 7 GB: importing the whole archive would write, hash and drop
all of it on every node. The image is streamed as an OCI layout whose missing blobs are those of unpacked layers.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

_OCI = "application/vnd.oci.image"


def chain_ids(diff_ids: Sequence[str]) -> list[str]:
    """The names of an image's snapshots, the lowest first: each covers its layer and all below it."""
    chain: list[str] = []
    for diff_id in diff_ids:
        text = f"{chain[-1]} {diff_id}" if chain else ""
        chain.append(f"sha256:{hashlib.sha256(text.encode()).hexdigest()}" if text else diff_id)
    return chain


def write_slim(archive: Path, unpacked: Collection[str], target: IO[bytes]) -> None:
    """Write the docker-archive as an OCI layout to a stream, without the layers whose snapshots are in `unpacked`."""
    manifests: list[dict[str, Any]] = []
    with tarfile.open(archive) as source, tarfile.open(fileobj=target, mode="w|") as out:
        for entry in json.loads(_read(source, "manifest.json")):
            config = _read(source, entry["Config"])
            diff_ids = json.loads(config)["rootfs"]["diff_ids"]
            layers = []
            for name, diff_id, chain in zip(entry["Layers"], diff_ids, chain_ids(diff_ids), strict=True):
                with _open(source, name) as layer:
                    size = layer.seek(0, io.SEEK_END)
                    layers.append({"mediaType": f"{_OCI}.layer.v1.tar", "digest": diff_id, "size": size})
                    if chain not in unpacked:
                        layer.seek(0)
                        _add(out, _blob(diff_id), layer, size)
            manifest = {
                "schemaVersion": 2,
                "mediaType": f"{_OCI}.manifest.v1+json",
                "config": _write(out, f"{_OCI}.config.v1+json", config),
                "layers": layers,
            }
            descriptor = _write(out, f"{_OCI}.manifest.v1+json", json.dumps(manifest).encode())
            manifests += [
                descriptor | {"annotations": {"io.containerd.image.name": tag}} for tag in _names(entry["RepoTags"])
            ]
        _add_bytes(out, "oci-layout", json.dumps({"imageLayoutVersion": "1.0.0"}).encode())
        _add_bytes(out, "index.json", json.dumps({"schemaVersion": 2, "manifests": manifests}).encode())


def count_new_bytes(archive: Path, unpacked: Collection[str]) -> int:
    """Bytes of the layers that write_slim would write."""
    total = 0
    with tarfile.open(archive) as source:
        for entry in json.loads(_read(source, "manifest.json")):
            diff_ids = json.loads(_read(source, entry["Config"]))["rootfs"]["diff_ids"]
            for name, chain in zip(entry["Layers"], chain_ids(diff_ids), strict=True):
                if chain not in unpacked:
                    with _open(source, name) as layer:
                        total += layer.seek(0, io.SEEK_END)
    return total


def _names(tags: Sequence[str]) -> Iterator[str]:
    """As Pods name them: without a registry means docker.io, and docker's own archives leave that out."""
    for tag in tags:
        host = tag.split("/")[0]
        yield tag if "." in host or ":" in host or host == "localhost" else f"docker.io/{tag}"


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
