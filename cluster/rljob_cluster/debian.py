"""Installs the Debian packages that this package's programs are in, where they are missing and root asks."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping

NODE_PROGRAMS = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "nft": "nftables",
    "ip": "iproute2",
    "conntrack": "conntrack",
    "openssl": "openssl",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
}
BUILD_PROGRAMS = {"buildah": "buildah", "debootstrap": "debootstrap"}


class PackagesError(Exception):
    """What is missing cannot be installed here; the message names it."""


def install_missing(programs: Mapping[str, str]) -> None:
    """`programs` maps each program to the package that has it."""
    missing = sorted({package for program, package in programs.items() if not shutil.which(program)})
    if not missing:
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise PackagesError(f"missing on this machine: {', '.join(missing)}; install them")
    print(f"installing {' '.join(missing)}", flush=True)
    command = ["apt-get", "install", "-y", "--no-install-recommends", *missing]
    subprocess.run(["apt-get", "update"], capture_output=True)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise PackagesError(f"{' '.join(command)} failed:\n{done.stderr[-1500:]}")
