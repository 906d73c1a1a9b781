"""Where the images of a node come from: buildah's store if it is on the same disk, else an archive.

A source is a string, `buildah:NAME-ID` or the path of NAME-DIGEST.tar, and always stands for the same content. Nodes
keep a list of the sources that they have loaded.
"""

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from rljob_cluster.host.commands import ClusterError
from rljob_cluster.images.build import FOLDERS, find_archives, image_name
from rljob_cluster.images.buildah_store import StoredImage, find_image
from rljob_cluster.images.oci_layout import read_archive
from rljob_cluster.node.image_store import import_images, link_image, list_snapshots
from rljob_cluster.node.node import Node

_STORED = "buildah:"
_ID_LENGTH = 16


def find_sources(near: Path) -> list[str]:
    """The newest source of each image that this repository builds."""
    sources = []
    for name in FOLDERS:
        stored = find_image(image_name(name), near)
        sources += [_format_source(name, stored)] if stored else [str(path) for path in find_archives(name)]
    return sources


def _format_source(name: str, stored: StoredImage) -> str:
    return f"{_STORED}{name}-{stored.id[:_ID_LENGTH]}"


def name_of(source: str) -> str:
    return Path(source.removeprefix(_STORED)).stem.rpartition("-")[0]


def version_of(source: str) -> str:
    return Path(source).stem.rpartition("-")[2]


def load_image(node: Node, source: str) -> None:
    """Add the image to the node; its containerd must run."""
    if not source.startswith(_STORED):
        with read_archive(Path(source)) as images:
            import_images(node, images)
        return
    name = name_of(source)
    stored = find_image(image_name(name), node.folder)
    if stored is None or _format_source(name, stored) != source:
        raise ClusterError(f"{source}: no longer in buildah's store; retry to load the current image")
    link_image(node, stored)


def choose_missing(history: Sequence[str], sources: Sequence[str]) -> list[str]:
    """The sources that differ from the last load of their image; an older image is a change too."""
    last = {name_of(source): source for source in history}
    return [source for source in sources if last.get(name_of(source)) != source]


def describe_disk_shortage(missing: Iterable[tuple[Node, list[str]]], folder: Path) -> str | None:
    """Why the disk is too small to unpack the new layers of archives: up to 7 GB per node, twice during the import."""
    sizes = [sum(_count_bytes(source, list_snapshots(node)) for source in sources) for node, sources in missing]
    needed, free = sum(sizes) + max(sizes), shutil.disk_usage(folder).free
    if needed <= free:
        return None
    return (
        f"the images need {needed / 1e9:.0f} GB in {len(sizes)} nodes, and {free / 1e9:.0f} GB are free; create a new "
        "cluster, which stores them once for all nodes: make cluster-down cluster"
    )


def _count_bytes(source: str, unpacked: set[str]) -> int:
    if source.startswith(_STORED):
        return 0
    with read_archive(Path(source)) as images:
        return sum(layer.size for image in images for layer in image.find_new(unpacked))
