"""Builds RLJob's images, and archives them for a cluster without a registry.

Owns which inputs an image depends on and when a build can be skipped; the Dockerfiles own the contents.
The invariant: an archive's name contains the digest of its inputs, so that it always stands for the same content.
"""

import functools
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from rljob_cluster.host.commands import ClusterError, run
from rljob_cluster.host.paths import ROOT, cache_root, find_uv, state_folder
from rljob_cluster.images.base_image import variable_of
from rljob_cluster.images.buildah_store import find_image
from rljob_cluster.images.labels import build_labels, find_revision
from rljob_cluster.images.tools import LABEL_INPUTS, Tool

Archive = Literal["no", "needed", "yes"]
FOLDERS = {
    "trainer": "trainer_image",
    "reward": "reward_image",
    "reward-py312": "reward_image",
    "operator": "operator",
}
"""Folders of each image: the folder with its Dockerfile and sources."""
_PARTS = {"trainer_image": "inputs", "reward_image": "plugins", "operator": "core"}
"""The other sources that a folder's Dockerfile copies, besides the api."""
PYTHONS = {"reward-py312": "3.12"}
"""Versions of images that need another Python than that of the default base."""
_MEMBERS = ("api", "inputs", "core", "operator", "trainer_image", "reward_image", "plugins", "cli", "cluster")


@dataclass(frozen=True)
class BuildResult:
    image: str
    digest: str
    size_mb: int
    seconds: float
    reused: bool
    archive: str | None
    base: str = ""
    tool: str = ""
    """Which has the image: buildah or docker."""


def image_name(name: str) -> str:
    return f"rljob/{name}:{_read_tag()}"


@functools.cache
def _read_tag() -> str:
    """The chart's appVersion, so that what is built is what the chart installs."""
    chart = (ROOT / "charts/rljob/Chart.yaml").read_text()
    return next(line.partition(": ")[2] for line in chart.splitlines() if line.startswith("appVersion: "))


def list_inputs(root: Path, name: str) -> list[Path]:
    """All files that the image is built from: lock file, pyprojects, its Dockerfile and its sources."""
    folder = FOLDERS[name]
    fixed = [root / "uv.lock", root / "pyproject.toml", root / ".dockerignore", root / folder / "Dockerfile"]
    fixed += [root / member / "pyproject.toml" for member in _MEMBERS]
    parts = ("api", _PARTS[folder], folder)
    sources = [p for part in parts for p in (root / part).rglob("*") if p.is_file()]
    kept = {p for p in sources if "__pycache__" not in p.parts and p.suffix != ".pyc"}
    return sorted(kept | set(fixed))


def digest_inputs(root: Path, files: Iterable[Path], arguments: Sequence[str]) -> str:
    digest = hashlib.sha256("\0".join(arguments).encode())
    for path in files:
        digest.update(f"\0{path.relative_to(root)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def build_command(
    tool: Tool,
    name: str,
    base: str,
    extra: str,
    digest: str,
    uv_cache: Path | None,
    labels: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    command = [tool.name, "build", "--network", "host", "-f", f"{FOLDERS[name]}/Dockerfile", "-t", image_name(name)]
    for key, value in {**labels, LABEL_INPUTS: digest}.items():
        command += ["--label", f"{key}={value}"]
    command += ["--build-arg", f"BASE_IMAGE={base}"]
    command += ["--build-arg", f"EXTRA={extra}"] if name == "trainer" else []
    command += ["--build-arg", f"PYTHON={PYTHONS[name]}"] if name in PYTHONS else []
    return [*command, *tool.build_options(base, uv_cache), "."]


def build_image(root: Path, name: str, tool: Tool, archive: Archive, pin_base: bool = False) -> BuildResult:
    """Build one image unless the existing image has the same inputs. With `pin_base`, build on one digest of the base
    instead of on what its tag means at the moment; raise ClusterError if the base has none."""
    start = time.monotonic()
    python = PYTHONS.get(name)
    base_name = os.environ.get(variable_of(python)) or tool.find_base(python)
    base = pin(tool, base_name) if pin_base else base_name
    extra, image = os.environ.get("EXTRA", "cpu"), image_name(name)
    digest = digest_inputs(root, list_inputs(root, name), (base, extra, *([python] if python else [])))
    info = tool.inspect(image)
    reused = info is not None and info.inputs == digest
    if not reused:
        base_digest = base.partition("@")[2] or tool.find_digest(base)
        labels = build_labels(name, _read_tag(), find_revision(root), base_name, base_digest)
        command = build_command(tool, name, base, extra, digest, _find_uv_cache(), labels)
        done = subprocess.run(command, cwd=root, stdout=sys.stderr)
        info = tool.inspect(image)
        if done.returncode != 0 or info is None:
            raise ClusterError(f"{image}: `{' '.join(command)}` failed ({done.returncode}); see its output above")
    cluster = state_folder() if state_folder().exists() else Path.cwd()
    can_be_linked = tool.name == "buildah" and find_image(image, cluster) is not None
    path = None
    if archive == "yes" or (archive == "needed" and not can_be_linked):
        path = _write_archive(tool, name, digest)
    seconds = round(time.monotonic() - start, 1)
    size = info.size_mb if info else 0
    return BuildResult(image, digest, size, seconds, reused, str(path) if path else None, base, tool.name)


def pin(tool: Tool, base: str) -> str:
    """Return the base by its digest. One that was built here keeps its name: no registry has it."""
    if "@" in base or base.startswith("localhost/"):
        return base
    tool.pull(base)
    digest = tool.find_digest(base)
    if digest is None:
        raise ClusterError(f"{base}: its digest is unknown; set {variable_of(None)} to NAME@sha256:DIGEST")
    folder, slash, name = base.rpartition("/")
    return f"{folder}{slash}{name.partition(':')[0]}@{digest}"


def find_archives(name: str) -> list[Path]:
    """The archives of this image, not those of one whose name begins with it."""
    return [path for path in sorted(_archives_folder().glob("*.tar")) if path.stem.rpartition("-")[0] == name]


def _archives_folder() -> Path:
    return cache_root() / "images"


def _write_archive(tool: Tool, name: str, digest: str) -> Path:
    """Replace the older archive of this image. A rename at the end keeps partial archives from being loaded."""
    path = _archives_folder() / f"{name}-{digest}.tar"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    for old in (part, *find_archives(name)):
        old.unlink(missing_ok=True)  # first, since the disk may not have room for two archives of 8 GB
    tool.save(image_name(name), part)
    part.rename(path)
    return path


def _find_uv_cache() -> Path | None:
    uv = find_uv()
    return Path(run(uv, "cache", "dir").strip()) if uv else None
