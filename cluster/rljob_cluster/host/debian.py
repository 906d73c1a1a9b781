"""Installs missing programs from Debian packages."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable

from rljob_cluster.host.commands import ClusterError

_PACKAGES = {
    "buildah": "buildah",
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
    subprocess.run(["apt-get", "update"], capture_output=True)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise ClusterError(f"{' '.join(command)}: exit code {done.returncode}:\n{done.stderr[-1500:]}")
