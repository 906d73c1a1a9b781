"""Installs missing programs from Debian packages."""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rljob_cluster.host.commands import ClusterError
from rljob_cluster.host.paths import cache_root

_PACKAGES = {
    "buildah": "buildah",
    "chromium-headless-shell": "chromium-headless-shell",
    "conntrack": "conntrack",
    "containerd": "containerd",
    "ctr": "containerd",
    "debootstrap": "debootstrap",
    "ip": "iproute2",
    "nft": "nftables",
    "openssl": "openssl",
    "runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
}
NODE_PROGRAMS = ("containerd", "ctr", "runc", "nft", "ip", "conntrack", "openssl", "/usr/lib/cni/bridge")


@contextmanager
def lock_apt() -> Iterator[None]:
    """Let one process of this project at a time use apt-get, which fails instead of waiting for its own locks."""
    cache_root().mkdir(parents=True, exist_ok=True)
    with (cache_root() / "apt.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def install_missing(programs: Iterable[str]) -> None:
    """Install the packages of the programs that are not on PATH. Raise ClusterError without root or apt-get."""
    missing = sorted({_PACKAGES[program] for program in programs if not shutil.which(program)})
    if not missing:
        return
    if os.geteuid() or not shutil.which("apt-get"):
        raise ClusterError(f"missing on this machine: {', '.join(missing)}; install these packages, or run as root")
    print(f"installing {' '.join(missing)}", file=sys.stderr, flush=True)
    command = ["apt-get", "install", "-y", "--no-install-recommends", *missing]
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    with lock_apt():
        subprocess.run(["apt-get", "update"], capture_output=True)
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise ClusterError(f"{' '.join(command)}: exit code {done.returncode}:\n{done.stderr[-1500:]}")
