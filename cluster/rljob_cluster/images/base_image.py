"""The base image for buildah: Docker Hub's Python, or, without a registry, Debian bookworm by debootstrap."""

import sys
import tempfile
from pathlib import Path

from rljob_cluster.host.commands import run, try_run
from rljob_cluster.host.debian import install_missing

DEFAULT_BASE = "python:3.11-slim-bookworm"
LOCAL_BASE = "localhost/rljob/base:bookworm"
# torch's compiler includes the headers of python3-dev. The official Python image contains them already.
_PACKAGES = ("python3", "python3-venv", "python3-dev", "g++", "libnuma1", "ca-certificates")
_PULL_TIMEOUT_SECONDS = 60


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
    with tempfile.TemporaryDirectory(prefix="rljob-base-") as folder:
        root = Path(folder) / "root"
        run("debootstrap", "--variant=minbase", f"--include={','.join(_PACKAGES)}", "bookworm", str(root))
        for package in (root / "var/cache/apt/archives").glob("*.deb"):
            package.unlink()
        name = run("buildah", "from", "scratch").strip()
        run("buildah", "add", "--quiet", name, str(root), "/")
        run("buildah", "commit", "--quiet", "--disable-compression", "--rm", name, LOCAL_BASE)
    return LOCAL_BASE
