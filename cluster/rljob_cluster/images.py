"""Builds RLJob's images with buildah or docker, and archives them for a cluster without a registry.

Owns which inputs an image depends on and when a build can be skipped; the Dockerfiles own what is in it.
The invariant: an archive's name holds the digest of its inputs, so a name never stands for two contents.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rljob_cluster.base_image import DEFAULT_BASE, ImageBuildError, ensure_base
from rljob_cluster.buildah_store import find_image
from rljob_cluster.debian import BUILD_PROGRAMS, PackagesError, install_missing

VERSION = "0.1.0"
FOLDERS = {"trainer": "trainer_image", "reward": "reward_image", "operator": "operator"}
MEMBERS = ("api", "operator", "trainer_image", "reward_image", "cli", "cluster")
_UV_CACHE_IN_BUILD = "/var/cache/host-uv"
# Files that say how this machine reaches package indexes; mounted for the build, never copied into the image.
_HOST_FILES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pip.conf", "/etc/uv/uv.toml")


@dataclass(frozen=True)
class Built:
    image: str
    digest: str
    size_mb: int
    seconds: float
    reused: bool
    archive: str | None


def input_files(root: Path, name: str) -> list[Path]:
    """Everything that the image is made of: lock file, pyprojects, its Dockerfile and its sources."""
    folder = FOLDERS[name]
    fixed = [root / "uv.lock", root / "pyproject.toml", root / ".dockerignore", root / folder / "Dockerfile"]
    fixed += [root / member / "pyproject.toml" for member in MEMBERS]
    sources = [p for part in ("api", folder) for p in (root / part).rglob("*") if p.is_file()]
    kept = {p for p in sources if "__pycache__" not in p.parts and p.suffix != ".pyc"}
    return sorted(kept | set(fixed))


def digest_inputs(root: Path, files: Iterable[Path], arguments: Sequence[str]) -> str:
    """A short digest over paths, contents and build arguments."""
    digest = hashlib.sha256("\0".join(arguments).encode())
    for path in files:
        digest.update(f"\0{path.relative_to(root)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def choose_tool() -> str:
    """CONTAINER_TOOL, else buildah, else docker."""
    tool = os.environ.get("CONTAINER_TOOL") or next((t for t in ("buildah", "docker") if shutil.which(t)), "")
    if tool not in ("buildah", "docker"):
        raise ImageBuildError(f"CONTAINER_TOOL must be buildah or docker, got {tool!r}; install buildah")
    return tool


def build_command(tool: str, name: str, base: str, extra: str, digest: str, uv_cache: Path | None) -> list[str]:
    """The command that builds one image; pure but for which host files exist."""
    command = [tool, "build", "--network", "host", "-f", f"{FOLDERS[name]}/Dockerfile", "-t", f"rljob/{name}:{VERSION}"]
    command += ["--label", f"rljob.dev/inputs={digest}", "--build-arg", f"BASE_IMAGE={base}"]
    if name == "trainer":
        command += ["--build-arg", f"EXTRA={extra}"]
    if tool == "buildah":
        command += ["--layers", "--disable-compression"]
        command += ["--pull-never"] if base.startswith("localhost/") else []
        for path in _HOST_FILES:
            if Path(path).is_file():
                command += ["--volume", f"{path}:{path}:ro"]
        if uv_cache is not None:
            command += ["--volume", f"{uv_cache}:{_UV_CACHE_IN_BUILD}"]
            command += ["--build-arg", f"UV_CACHE_DIR={_UV_CACHE_IN_BUILD}"]
    return [*command, "."]


def archive_path(name: str, digest: str) -> Path:
    """Where `python -m rljob_cluster load` looks for an image."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "rljob" / "cluster" / "images" / f"{name}-{digest}.tar"


def _uv_cache() -> Path | None:
    if not shutil.which("uv"):
        return None
    return Path(subprocess.run(["uv", "cache", "dir"], check=True, capture_output=True, text=True).stdout.strip())


def _inspect(tool: str, image: str) -> tuple[str | None, int]:
    """The label of the image that is there, and its size in MB."""
    if tool == "docker":
        form = '{{index .Config.Labels "rljob.dev/inputs"}} {{.Size}}'
        done = subprocess.run(["docker", "image", "inspect", "-f", form, image], capture_output=True, text=True)
        label, _, size = done.stdout.strip().rpartition(" ")
        return (label or None, int(size) // 1_000_000) if done.returncode == 0 else (None, 0)
    form = '{{index .OCIv1.Config.Labels "rljob.dev/inputs"}}'
    done = subprocess.run(["buildah", "inspect", "-t", "image", "-f", form, image], capture_output=True, text=True)
    if done.returncode != 0:
        return None, 0
    listed = subprocess.run(["buildah", "images", "--json", image], check=True, capture_output=True, text=True)
    return done.stdout.strip(), _megabytes(json.loads(listed.stdout)[0]["size"])


def _megabytes(text: str) -> int:
    number, unit = text.split()
    return round(float(number) * {"B": 1e-6, "KB": 1e-3, "MB": 1.0, "GB": 1e3}[unit.upper()])


def _archive(tool: str, name: str, digest: str) -> Path:
    """Written beside its name and renamed, so that a half-written archive is never loaded. Takes the older one's
    place."""
    path, image = archive_path(name, digest), f"rljob/{name}:{VERSION}"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    for old in (part, *path.parent.glob(f"{name}-*.tar")):
        old.unlink(missing_ok=True)  # first: two archives of 8 GB may be more than the disk has
    if tool == "docker":
        subprocess.run(["docker", "save", "-o", str(part), image], check=True)
    else:
        target = f"docker-archive:{part}:docker.io/{image}"  # uncompressed, which oci-archive never is
        subprocess.run(["buildah", "push", "--quiet", "--disable-compression", image, target], check=True)
    part.rename(path)
    return path


def needs_archive(name: str) -> bool:
    """Whether a cluster of this machine cannot take the image out of the builder's store."""
    state = Path(os.environ.get("RLJOB_CLUSTER_DIR") or ".cluster")
    return find_image(f"rljob/{name}:{VERSION}", state if state.exists() else Path.cwd()) is None


def build_image(root: Path, name: str, archive: Literal["no", "needed", "yes"]) -> Built:
    """Build one image unless the image that is there has the same inputs."""
    tool, start = choose_tool(), time.monotonic()
    base, extra = ensure_base(tool, os.environ.get("BASE_IMAGE")), os.environ.get("EXTRA", "cpu")
    digest = digest_inputs(root, input_files(root, name), (base, extra))
    image = f"rljob/{name}:{VERSION}"
    reused = _inspect(tool, image)[0] == digest
    if not reused:
        command = build_command(tool, name, base, extra, digest, _uv_cache())
        done = subprocess.run(command, cwd=root, stdout=sys.stderr)
        if done.returncode != 0:
            raise ImageBuildError(f"{image}: `{' '.join(command)}` failed ({done.returncode}); its output is above")
    is_wanted = archive == "yes" or (archive == "needed" and (tool == "docker" or needs_archive(name)))
    path = _archive(tool, name, digest) if is_wanted else None
    size = _inspect(tool, image)[1]
    return Built(image, digest, size, round(time.monotonic() - start, 1), reused, str(path) if path else None)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rljob_cluster.images", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="IMAGE", help=f"of {', '.join(FOLDERS)}; default: all")
    parser.add_argument(
        "--archive", action="store_const", const="yes", default="no", help="also write an archive of each"
    )
    parser.add_argument(
        "--loadable",
        action="store_const",
        const="needed",
        dest="archive",
        help="also write an archive where a cluster of this machine cannot link to buildah's store",
    )
    parser.add_argument("--output", choices=("table", "json"), default="table")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in FOLDERS]:
        parser.error(f"no such image: {', '.join(unknown)}; there are {', '.join(FOLDERS)}")
    try:
        if options.archive == "needed" and os.geteuid() == 0 and not any(map(shutil.which, ("buildah", "docker"))):
            install_missing(BUILD_PROGRAMS)
        built = [build_image(Path.cwd(), name, options.archive) for name in options.names or FOLDERS]
    except (ImageBuildError, PackagesError) as error:
        print(error, file=sys.stderr)
        return 1
    if options.output == "json":
        print(json.dumps([asdict(image) for image in built], indent=2))
        return 0
    print(f"{'IMAGE':<24}{'SIZE':>9}{'SECONDS':>9}  ARCHIVE")
    for b in built:
        print(f"{b.image:<24}{b.size_mb:>6} MB{b.seconds:>9}  {b.archive or '-'}{' (unchanged)' if b.reused else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())


__all__ = ["DEFAULT_BASE", "Built", "ImageBuildError", "archive_path", "build_image", "digest_inputs", "main"]
