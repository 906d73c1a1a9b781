"""Whether this machine can run a cluster; checked before anything is built.

Each capability is tried: containers on shared hosts report capabilities that they do not have.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from rljob_cluster.host.cgroups import cgroup_controllers
from rljob_cluster.host.commands import ClusterError, run

MIN_FREE_DISK_GB = 25
"""For the images of a first build, their build inputs, and the programs of Kubernetes."""
_PROBE = "rljob-probe"
_REMEDY = "on a container host, use a privileged container"


def find_missing_requirements() -> Iterator[str]:
    """What a cluster needs and this machine does not allow, each with the remedy."""
    if os.geteuid() != 0:
        yield "a cluster on this machine needs root (nodes are containerd and kubelet); E2E_CONTEXT= uses one"
        return
    for controller in cgroup_controllers():
        try:
            (controller / _PROBE).mkdir(exist_ok=True)
            (controller / _PROBE).rmdir()
        except OSError as error:
            yield f"cannot create a cgroup in {controller}: {error.strerror}; {_REMEDY}"
            break
    if shutil.which("ip"):
        try:
            run("ip", "link", "add", _PROBE, "type", "bridge")
            run("ip", "link", "delete", _PROBE)
        except ClusterError as error:
            yield f"cannot create a network bridge: {error}; {_REMEDY}"


def find_disk_shortage(folder: Path) -> str | None:
    """Why a first build would not fit; a later one needs less."""
    free = shutil.disk_usage(folder).free / 1e9
    if free >= MIN_FREE_DISK_GB:
        return None
    return f"{free:.0f} GB are free; a first build of the images needs {MIN_FREE_DISK_GB} GB"
