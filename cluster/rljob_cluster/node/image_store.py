"""Puts images into the containerd of a node: from an archive, or as hard links to buildah's store."""

import contextlib
import json
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rljob_cluster.host.commands import ClusterError, run
from rljob_cluster.images.buildah_store import StoredImage
from rljob_cluster.images.oci_layout import Image, chain_ids, write_layout
from rljob_cluster.node.node import Node

_COLLECT = "collect-garbage"
_GC_ROOT = "containerd.io/gc.root"
# buildah's store is a bind mount of itself, and links cannot cross mounts; a new mount namespace removes that mount.
_LINK_LAYER = 'while mountpoint -q "$1"; do umount --lazy "$1"; done; exec cp -al "$2/." "$3"'


def ctr(node: Node, *arguments: str) -> str:
    return run(*node.ctr_command(*arguments))


def list_snapshots(node: Node) -> set[str]:
    return {line.split()[0] for line in ctr(node, "snapshots", "list").splitlines()[1:]}


def import_images(node: Node, images: Sequence[Image]) -> None:
    """Import and unpack what is new in the images, then delete the packed layers: half of the disk space."""
    _import(node, images)
    _delete_packed_layers(node)


def link_image(node: Node, stored: StoredImage) -> None:
    """Add an image of buildah's store on the same disk: each new layer becomes a snapshot of hard links."""
    unpacked, parent, linked = list_snapshots(node), "", []
    chains = chain_ids([layer.diff_id for layer in stored.image.layers])
    for folder, chain in zip(stored.folders, chains, strict=True):
        if chain not in unpacked:
            if f"link-{chain}" in unpacked:  # left by an interrupted load
                ctr(node, "snapshots", "delete", f"link-{chain}")
            _link_layer(node, folder, chain, parent)
            linked.append(chain)
        parent = chain
    _import(node, [stored.image])
    for chain in linked:
        ctr(node, "snapshots", "label", chain, f"{_GC_ROOT}=")  # the image references the snapshot from now on


def _link_layer(node: Node, folder: Path, chain: str, parent: str) -> None:
    key = f"link-{chain}"
    ctr(node, "snapshots", "prepare", key, *filter(None, [parent]))
    mount = ctr(node, "snapshots", "mounts", "/nowhere", key)
    upper = re.search(r"upperdir=([^,\s]+)", mount)
    target = upper[1] if upper else mount.split()[3]
    run("unshare", "--mount", "sh", "-c", _LINK_LAYER, "sh", str(folder.parents[1]), str(folder), target)
    ctr(node, "snapshots", "commit", chain, key)


def _import(node: Node, images: Sequence[Image]) -> None:
    unpacked = list_snapshots(node)
    with (
        tempfile.TemporaryFile() as output,
        subprocess.Popen(
            node.ctr_command("images", "import", "-"), stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT
        ) as process,
    ):
        assert process.stdin
        with contextlib.suppress(BrokenPipeError):  # then ctr reports the reason below
            write_layout(images, unpacked, process.stdin)
            process.stdin.close()
        if process.wait():
            output.seek(0)
            message = output.read().decode()[-1500:]
            raise ClusterError(f"{node.name}: cannot import {images[0].names[0]}: {message}")


def _delete_packed_layers(node: Node) -> None:
    for line in ctr(node, "images", "list").splitlines()[1:]:
        manifest = json.loads(ctr(node, "content", "get", line.split()[2]))
        present = set(ctr(node, "content", "list", "--quiet").split())
        if layers := sorted({layer["digest"] for layer in manifest.get("layers", ())} & present):
            ctr(node, "content", "delete", *layers)
    ctr(node, "leases", "create", "--id", _COLLECT)
    ctr(node, "leases", "delete", "--sync", _COLLECT)  # returns after garbage collection
