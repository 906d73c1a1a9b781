"""Where a node's images come from: buildah's store where it lies on the same disk, else an archive.

A source is a string, `buildah:NAME-ID` or the path of NAME-DIGEST.tar, and names one content for ever: nodes keep a
list of those that they have taken.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from rljob_cluster.host.commands import CommandError
from rljob_cluster.host.paths import cache_root
from rljob_cluster.images.build import FOLDERS, image_name
from rljob_cluster.images.buildah_store import StoredImage, find_image
from rljob_cluster.images.oci_layout import read_archive
from rljob_cluster.node.node import Node

_STORED = "buildah:"
_ID_LENGTH = 16


def find_sources(near: Path) -> list[str]:
    """The newest of each image that this repository builds."""
    found = []
    for name in FOLDERS:
        stored = find_stored(name, near)
        archives = sorted((cache_root() / "images").glob(f"{name}-*.tar"))
        found += [_write_source(name, stored)] if stored else [str(path) for path in archives]
    return found


def find_stored(name: str, near: Path) -> StoredImage | None:
    return find_image(image_name(name), near)


def _write_source(name: str, stored: StoredImage) -> str:
    return f"{_STORED}{name}-{stored.id[:_ID_LENGTH]}"


def name_of(source: str) -> str:
    """Which image it is."""
    return Path(source.removeprefix(_STORED)).stem.rpartition("-")[0]


def version_of(source: str) -> str:
    return Path(source).stem.rpartition("-")[2]


def load_image(node: Node, source: str) -> None:
    """Give the image to the node, whose containerd runs."""
    if not source.startswith(_STORED):
        node.import_archive(Path(source))
        return
    stored = find_stored(name_of(source), node.folder)
    if stored is None or _write_source(name_of(source), stored) != source:
        raise CommandError(f"{source} is no longer in buildah's store; run it again for the image that is there now")
    node.link_image(stored)


def choose_missing(history: Sequence[str], sources: Sequence[str]) -> list[str]:
    """Those that are not the last of their image that was taken: going back to an older one is a change too."""
    last = {name_of(source): source for source in history}
    return [source for source in sources if last.get(name_of(source)) != source]


def describe_disk_shortage(wanted: Iterable[tuple[Node, list[str]]], folder: Path) -> str | None:
    """Each node unpacks what is new in an archive: with other dependencies of the trainer that is 7 GB a node, and as
    much again while it is imported."""
    sizes = [sum(_count_bytes(source, node.list_snapshots()) for source in missing) for node, missing in wanted]
    needed, free = sum(sizes) + max(sizes), shutil.disk_usage(folder).free
    if needed <= free:
        return None
    return (
        f"the images need {needed / 1e9:.0f} GB in {len(sizes)} nodes, and {free / 1e9:.0f} GB are free; a new "
        "cluster has them once for all nodes: make cluster-down cluster"
    )


def _count_bytes(source: str, unpacked: set[str]) -> int:
    if source.startswith(_STORED):
        return 0
    with read_archive(Path(source)) as found:
        return sum(layer.size for image in found for layer in image.find_new(unpacked))
