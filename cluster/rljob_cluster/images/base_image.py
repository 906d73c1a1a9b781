"""The base images for buildah: Docker Hub's Python, or, without a registry, Debian bookworm by debootstrap.

No Debian has Python 3.12: an image that needs it has no base without a registry.
"""

import sys
import tempfile
from pathlib import Path

from rljob_cluster.host.commands import ClusterError, run, try_run
from rljob_cluster.host.debian import install_missing

_DEFAULT_PYTHON = "3.11"
LOCAL_BASE = "localhost/rljob/base:bookworm"
# torch's compiler includes the headers of python3-dev. The official Python image contains them already.
_PACKAGES = ("python3", "python3-venv", "python3-dev", "g++", "libnuma1", "ca-certificates")
_PULL_TIMEOUT_SECONDS = 60


class NoBaseError(ClusterError):
    """There is no base with this Python on this machine, and none can be pulled."""


def hub_name(python: str | None = None) -> str:
    """Return the image on Docker Hub with this Python, such as "3.12"; None: with the default one."""
    return f"python:{python or _DEFAULT_PYTHON}-slim-bookworm"


def variable_of(python: str | None) -> str:
    """Return the environment variable that names another base."""
    return f"BASE_IMAGE_PY{python.replace('.', '')}" if python else "BASE_IMAGE"


def ensure_base(python: str | None = None) -> str:
    """Return the base to build on; pull or build it if it is missing. Raise NoBaseError if neither is possible."""
    hub_base = f"docker.io/library/{hub_name(python)}"
    for image in (hub_base,) if python else (LOCAL_BASE, hub_base):
        # No timeout: the command waits while another build locks the store.
        if try_run("buildah", "inspect", "-t", "image", image):
            return image
    if try_run("buildah", "pull", "--quiet", hub_base, timeout_seconds=_PULL_TIMEOUT_SECONDS):
        return hub_base
    if python:
        remedy = f"set {variable_of(python)} to an image with Python {python} and venv"
        raise NoBaseError(f"cannot pull {hub_name(python)}; {remedy}")
    print(f"cannot pull {hub_name()}: building {LOCAL_BASE} with debootstrap (1 minute)", file=sys.stderr, flush=True)
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
