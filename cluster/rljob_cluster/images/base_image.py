"""The base image for buildah: Docker Hub's Python, or, without a registry, Debian bookworm by debootstrap."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from rljob_cluster.host.commands import try_run
from rljob_cluster.host.debian import install_missing

DEFAULT_BASE = "python:3.11-slim-bookworm"
LOCAL_BASE = "localhost/rljob/base:bookworm"
# torch's compiler includes the headers of python3-dev. The official Python image contains them already.
_PACKAGES = ("python3", "python3-venv", "python3-dev", "g++", "libnuma1", "ca-certificates")
_PULL_TIMEOUT_SECONDS = 60


class ImageBuildError(RuntimeError):
    """An image cannot be built; the message contains the remedy."""


def ensure_base() -> str:
    """Return the base to build on; pull or build it if it is missing."""
    hub_base = f"docker.io/library/{DEFAULT_BASE}"
    for image in (LOCAL_BASE, hub_base):
        # No timeout: the command waits while another build locks the store.
        if try_run("buildah", "inspect", "-t", "image", image):
            return image
    if try_run("buildah", "pull", "--quiet", hub_base, timeout_seconds=_PULL_TIMEOUT_SECONDS):
        return hub_base
    print(f"cannot pull {DEFAULT_BASE}: building {LOCAL_BASE} with debootstrap (1 minute)", file=sys.stderr, flush=True)
    install_missing(["debootstrap"])
    try:
        _build_local_base()
    except subprocess.CalledProcessError as error:
        output = (error.stdout + error.stderr)[-2000:]
        raise ImageBuildError(
            f"{LOCAL_BASE}: `{' '.join(error.cmd)}` failed ({error.returncode}):\n{output}"
        ) from error
    return LOCAL_BASE


def _build_local_base() -> None:
    with tempfile.TemporaryDirectory(prefix="rljob-base-") as folder:
        root = Path(folder) / "root"
        _run("debootstrap", "--variant=minbase", f"--include={','.join(_PACKAGES)}", "bookworm", str(root))
        for package in (root / "var/cache/apt/archives").glob("*.deb"):
            package.unlink()
        name = _run("buildah", "from", "scratch").strip()
        _run("buildah", "add", "--quiet", name, str(root), "/")
        _run("buildah", "commit", "--quiet", "--disable-compression", "--rm", name, LOCAL_BASE)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
