"""The base image where no registry can be reached: Debian bookworm with Python and g++, by debootstrap.

Owns only the choice of BASE_IMAGE; the Dockerfiles do the rest alike on either base.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DEFAULT_BASE = "python:3.11-slim-bookworm"
LOCAL_BASE = "localhost/rljob/base:bookworm"
# python3-dev: what torch's compiler includes. The official Python image has the headers already.
PACKAGES = ("python3", "python3-venv", "python3-dev", "g++", "libnuma1", "ca-certificates")
_PULL_SECONDS = 60


class ImageBuildError(RuntimeError):
    """An image cannot be built; the message names the remedy."""


def ensure_base(tool: str, wanted: str | None) -> str:
    """The base to build on: the one asked for, the default where it can be had, else one of our own."""
    if tool == "docker" or wanted:
        return wanted or DEFAULT_BASE
    for image in (LOCAL_BASE, f"docker.io/library/{DEFAULT_BASE}"):
        if _succeeds([tool, "inspect", "-t", "image", image]):
            return image
    if _succeeds([tool, "pull", "--quiet", f"docker.io/library/{DEFAULT_BASE}"], _PULL_SECONDS):
        return f"docker.io/library/{DEFAULT_BASE}"
    print(f"{DEFAULT_BASE} cannot be pulled: building {LOCAL_BASE} with debootstrap", file=sys.stderr)
    _build_local_base(tool)
    return LOCAL_BASE


def _succeeds(command: list[str], seconds: float | None = None) -> bool:
    """Without a limit, since a store that another build has locked is no answer."""
    try:
        return subprocess.run(command, capture_output=True, timeout=seconds).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _build_local_base(tool: str) -> None:
    if not shutil.which("debootstrap"):
        raise ImageBuildError(f"{DEFAULT_BASE} cannot be pulled: install debootstrap, or set BASE_IMAGE")
    with tempfile.TemporaryDirectory(prefix="rljob-base-") as folder:
        root = Path(folder) / "root"
        bootstrap = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", "bookworm", str(root)]
        try:
            subprocess.run(bootstrap, check=True, stdout=sys.stderr)
            for downloaded in (root / "var/cache/apt/archives").glob("*.deb"):
                downloaded.unlink()
            container = subprocess.run([tool, "from", "scratch"], check=True, capture_output=True, text=True)
            name = container.stdout.strip()
            subprocess.run([tool, "add", "--quiet", name, str(root), "/"], check=True, stdout=sys.stderr)
            commit = [tool, "commit", "--quiet", "--disable-compression", "--rm", name, LOCAL_BASE]
            subprocess.run(commit, check=True, stdout=sys.stderr)
        except subprocess.CalledProcessError as error:
            raise ImageBuildError(f"{LOCAL_BASE}: `{' '.join(error.cmd)}` failed ({error.returncode})") from error
