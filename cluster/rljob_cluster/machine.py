"""Whether this machine can be a cluster: asked before anything is built, so that the answer costs no time.

Each thing is tried, not looked up: containers on shared hosts claim much that they may not do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from rljob_cluster.node import cgroup_controllers

DISK_GB = 25
"""For the images of a first build, what they are made of, and Kubernetes' own programs."""
_PROBE = "rljob-probe"


def find_lacks() -> Iterator[str]:
    """What this machine would have to let us do, each with the remedy."""
    if os.geteuid() != 0:
        yield "a cluster on this machine needs root (nodes are containerd and kubelet); E2E_CONTEXT= uses one"
        return
    for controller in cgroup_controllers():
        if problem := _try_cgroup(controller):
            yield f"no cgroup can be made in {controller}: {problem}; on a container host, run it privileged"
            break
    if shutil.which("ip") and (problem := _try_bridge()):
        yield f"no network bridge can be made: {problem}; on a container host, run it privileged"


def find_lack_of_disk(folder: Path) -> str | None:
    """Why a first build would not fit; a later one needs less."""
    free = shutil.disk_usage(folder).free / 1e9
    return None if free >= DISK_GB else f"{free:.0f} GB are free; a first build of the images needs {DISK_GB} GB"


def _try_cgroup(controller: Path) -> str:
    probe = controller / _PROBE
    try:
        probe.mkdir(exist_ok=True)
        probe.rmdir()
    except OSError as error:
        return str(error.strerror)
    return ""


def _try_bridge() -> str:
    made = subprocess.run(["ip", "link", "add", _PROBE, "type", "bridge"], capture_output=True, text=True, check=False)
    if made.returncode == 0:
        subprocess.run(["ip", "link", "delete", _PROBE], capture_output=True, check=False)
    return made.stderr.strip() if made.returncode else ""
