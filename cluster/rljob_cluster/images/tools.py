"""The container tools docker and buildah: which one works on this machine, and what they do differently.

A program on PATH proves little: a docker client often has no daemon, and crun refuses hybrid cgroups.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rljob_cluster.host.cgroups import is_hybrid
from rljob_cluster.host.commands import ClusterError, try_run
from rljob_cluster.host.debian import install_missing
from rljob_cluster.images.base_image import LOCAL_BASE, ensure_base, hub_name

ENV_TOOL = "CONTAINER_TOOL"
LABEL_INPUTS = "rljob.dev/inputs"
_UV_CACHE_IN_BUILD = "/var/cache/host-uv"
# Files that configure how this machine reaches package indexes; mounted for the build, never copied into the image.
_HOST_FILES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pip.conf", "/etc/uv/uv.toml")


@dataclass(frozen=True)
class ImageInfo:
    inputs: str
    """Value of the label with the digest of the inputs."""
    size_mb: int


class Docker:
    name: ClassVar = "docker"

    def find_base(self, python: str | None = None) -> str:
        """Return the base with this Python; None: the default one's."""
        return hub_name(python)

    def build_options(self, base: str, uv_cache: Path | None) -> list[str]:
        return []

    def inspect(self, image: str) -> ImageInfo | None:
        """None if the image does not exist."""
        form = f'{{{{index .Config.Labels "{LABEL_INPUTS}"}}}} {{{{.Size}}}}'
        done = subprocess.run(["docker", "image", "inspect", "-f", form, image], capture_output=True, text=True)
        inputs, _, size = done.stdout.strip().rpartition(" ")
        return ImageInfo(inputs, int(size) // 1_000_000) if done.returncode == 0 else None

    def pull(self, image: str) -> None:
        """Pull an image if a registry has it."""
        try_run("docker", "pull", "--quiet", image)

    def find_digest(self, image: str) -> str | None:
        """Return the digest that the registry has it by; None if it is not pulled."""
        form = "{{range .RepoDigests}}{{println .}}{{end}}"
        done = subprocess.run(["docker", "image", "inspect", "-f", form, image], capture_output=True, text=True)
        return done.stdout.strip().partition("\n")[0].partition("@")[2] or None

    def save(self, image: str, archive: Path) -> None:
        """Write an uncompressed docker-archive."""
        subprocess.run(["docker", "save", "-o", str(archive), image], check=True)


@dataclass(frozen=True)
class Buildah:
    name: ClassVar = "buildah"
    runtime: str | None = None
    """OCI runtime for RUN instructions; None for buildah's own choice."""

    def find_base(self, python: str | None = None) -> str:
        return ensure_base(python)

    def build_options(self, base: str, uv_cache: Path | None) -> list[str]:
        options = ["--layers", "--disable-compression"]
        options += ["--runtime", self.runtime] if self.runtime else []
        options += ["--pull-never"] if base == LOCAL_BASE else []
        for path in filter(os.path.isfile, _HOST_FILES):
            options += ["--volume", f"{path}:{path}:ro"]
        if uv_cache is not None:
            options += ["--volume", f"{uv_cache}:{_UV_CACHE_IN_BUILD}"]
            options += ["--build-arg", f"UV_CACHE_DIR={_UV_CACHE_IN_BUILD}"]
        return options

    def inspect(self, image: str) -> ImageInfo | None:
        form = f'{{{{index .OCIv1.Config.Labels "{LABEL_INPUTS}"}}}}'
        done = subprocess.run(["buildah", "inspect", "-t", "image", "-f", form, image], capture_output=True, text=True)
        if done.returncode != 0:
            return None
        listed = subprocess.run(["buildah", "images", "--json", image], check=True, capture_output=True, text=True)
        return ImageInfo(done.stdout.strip(), _megabytes(json.loads(listed.stdout)[0]["size"]))

    def pull(self, image: str) -> None:
        """Pull an image if a registry has it."""
        try_run("buildah", "pull", "--quiet", image)

    def find_digest(self, image: str) -> str | None:
        """Return the digest of its manifest; None if the store does not have it."""
        form = "{{.FromImageDigest}}"
        done = subprocess.run(["buildah", "inspect", "-t", "image", "-f", form, image], capture_output=True, text=True)
        return done.stdout.strip() or None

    def save(self, image: str, archive: Path) -> None:
        target = f"docker-archive:{archive}:docker.io/{image}"  # oci-archive is always compressed
        subprocess.run(["buildah", "push", "--quiet", "--disable-compression", image, target], check=True)


def _megabytes(text: str) -> int:
    number, unit = text.split()
    return round(float(number) * {"B": 1e-6, "KB": 1e-3, "MB": 1.0, "GB": 1e3}[unit.upper()])


Tool = Docker | Buildah


def choose_tool() -> Tool:
    """CONTAINER_TOOL, else the first of buildah and docker that works, else a newly installed buildah."""
    requested = os.environ.get(ENV_TOOL, "")
    if requested not in ("", "buildah", "docker"):
        raise ClusterError(f"{ENV_TOOL}: must be buildah or docker, got {requested!r}; unset it to choose a tool")
    if requested == "docker" and not try_run("docker", "info"):
        raise ClusterError(f"{ENV_TOOL}: `docker info` fails; start docker's daemon, or unset {ENV_TOOL}")
    if requested == "docker":
        return _report(Docker(), f"{ENV_TOOL} requests it")
    if requested == "buildah":
        return _report(_prepare_buildah(), f"{ENV_TOOL} requests it")
    if try_run("buildah", "info"):
        return _report(_prepare_buildah(), "it is installed")
    if try_run("docker", "info"):
        return _report(Docker(), "its daemon answers, and buildah is not installed")
    problems = [f"`{t} info` fails" if shutil.which(t) else f"{t} is not installed" for t in ("buildah", "docker")]
    return _report(_prepare_buildah(), f"no tool worked before ({', '.join(problems)})")


def _prepare_buildah() -> Buildah:
    install_missing(["buildah"])
    runtime = _choose_runtime()
    if not try_run("buildah", "info"):
        raise ClusterError("`buildah info` fails; run it to see why, or use a docker whose daemon answers")
    return Buildah(runtime)


def _choose_runtime() -> str | None:
    """None leaves the choice to buildah, which prefers crun."""
    if os.environ.get("BUILDAH_RUNTIME") or (shutil.which("crun") and not is_hybrid()):
        return None
    install_missing(["runc"])
    return "runc"


def _report(tool: Tool, reason: str) -> Tool:
    runtime = f" ({tool.runtime})" if isinstance(tool, Buildah) and tool.runtime else ""
    print(f"building images with {tool.name}{runtime}: {reason}", file=sys.stderr, flush=True)
    return tool
