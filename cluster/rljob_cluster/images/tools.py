"""What the two container tools do differently: options of a build, inspection, and archives."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from rljob_cluster.images.base_image import DEFAULT_BASE, LOCAL_BASE, ensure_base

LABEL_INPUTS = "rljob.dev/inputs"
_UV_CACHE_IN_BUILD = "/var/cache/host-uv"
# Files that configure how this machine reaches package indexes; mounted for the build, never copied into the image.
_HOST_FILES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pip.conf", "/etc/uv/uv.toml")


@dataclass(frozen=True)
class ImageInfo:
    inputs: str
    """Value of the label with the digest of the inputs."""
    size_mb: int


class Tool(Protocol):
    name: ClassVar[str]

    def find_base(self) -> str:
        """BASE_IMAGE, else the base that this tool can build on."""

    def build_options(self, base: str, uv_cache: Path | None) -> list[str]: ...

    def inspect(self, image: str) -> ImageInfo | None:
        """None if the image does not exist."""

    def save(self, image: str, archive: Path) -> None:
        """Write an uncompressed docker-archive."""


class Docker:
    name: ClassVar[str] = "docker"

    def find_base(self) -> str:
        return os.environ.get("BASE_IMAGE") or DEFAULT_BASE

    def build_options(self, base: str, uv_cache: Path | None) -> list[str]:
        return []

    def inspect(self, image: str) -> ImageInfo | None:
        form = f'{{{{index .Config.Labels "{LABEL_INPUTS}"}}}} {{{{.Size}}}}'
        done = subprocess.run(["docker", "image", "inspect", "-f", form, image], capture_output=True, text=True)
        inputs, _, size = done.stdout.strip().rpartition(" ")
        return ImageInfo(inputs, int(size) // 1_000_000) if done.returncode == 0 else None

    def save(self, image: str, archive: Path) -> None:
        subprocess.run(["docker", "save", "-o", str(archive), image], check=True)


@dataclass(frozen=True)
class Buildah:
    name: ClassVar[str] = "buildah"
    runtime: str | None = None
    """OCI runtime for RUN instructions; None for buildah's own choice."""

    def find_base(self) -> str:
        return os.environ.get("BASE_IMAGE") or ensure_base()

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

    def save(self, image: str, archive: Path) -> None:
        target = f"docker-archive:{archive}:docker.io/{image}"  # oci-archive is always compressed
        subprocess.run(["buildah", "push", "--quiet", "--disable-compression", image, target], check=True)


def _megabytes(text: str) -> int:
    number, unit = text.split()
    return round(float(number) * {"B": 1e-6, "KB": 1e-3, "MB": 1.0, "GB": 1e3}[unit.upper()])
