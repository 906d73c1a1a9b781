"""What a cluster leaves on the machine outside its folder, and how it goes: Pods, mounts, interfaces, rules, cgroups.

Everything is found by the cluster's own names, so a second cluster of someone else's is never touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from rljob_cluster.host.cgroups import cgroup_controllers
from rljob_cluster.node.node import RUN, Node

DEVICE = "rljob-api"
"""The interface whose address the API server is at."""
NFT_TABLE = "rljob-cluster"
_PROXY_TABLES = (("ip", "kube-proxy"), ("ip6", "kube-proxy"))
_CNI_RESULTS = Path("/var/lib/cni/results")
_NETWORK_NAMESPACES = Path("/var/run/netns")
_PATIENCE_SECONDS = 20.0


def remove_everything(nodes: Sequence[Node], state: Path) -> None:
    """Take the machine back to what it was. May be repeated, and after a crash."""
    _kill_pods(nodes)
    for path in sorted(_mounts_below(RUN, state), reverse=True):
        subprocess.run(["umount", "--lazy", path], capture_output=True)
    for node in nodes:
        _remove_network_namespaces(node)
        subprocess.run(["ip", "link", "delete", node.bridge], capture_output=True)
        for controller in cgroup_controllers():
            _remove_cgroup(controller / node.name)
    subprocess.run(["ip", "link", "delete", DEVICE], capture_output=True)
    for family, table in (("ip", NFT_TABLE), *_PROXY_TABLES):
        subprocess.run(["nft", "delete", "table", family, table], capture_output=True)
    shutil.rmtree(RUN, ignore_errors=True)
    for part in ("nodes", "control-plane", "images", "run"):
        shutil.rmtree(state / part, ignore_errors=True)


def _kill_pods(nodes: Sequence[Node]) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while (pids := _pod_pids(nodes) | _shim_pids()) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def _pod_pids(nodes: Sequence[Node]) -> set[int]:
    found: set[int] = set()
    for node in nodes:
        for controller in cgroup_controllers():
            for procs in (controller / node.name).rglob("cgroup.procs"):
                with contextlib.suppress(OSError):
                    found.update(map(int, procs.read_text().split()))
    return found


def _shim_pids() -> set[int]:
    """containerd's shims outlive it; each names its socket."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if b"containerd-shim" in words[0] and any(word.startswith(bytes(RUN)) for word in words):
                found.add(int(folder.name))
    return found


def _mounts_below(*folders: Path) -> list[str]:
    lines = Path("/proc/self/mounts").read_text().splitlines()
    points = [line.split()[1].replace("\\040", " ") for line in lines]
    return [point for point in points if any(point.startswith(f"{folder}/") for folder in folders)]


def _remove_network_namespaces(node: Node) -> None:
    """CNI remembers which namespace each Pod of a network has."""
    for result in _CNI_RESULTS.glob(f"{node.name}-*"):
        with contextlib.suppress(OSError, ValueError):
            namespace = Path(json.loads(result.read_text()).get("netns") or "")
            if namespace.parent.resolve() == _NETWORK_NAMESPACES.resolve():
                subprocess.run(["ip", "netns", "delete", namespace.name], capture_output=True)
        result.unlink(missing_ok=True)


def _remove_cgroup(cgroup: Path) -> None:
    for folder in sorted((path for path in cgroup.rglob("*") if path.is_dir()), reverse=True):
        with contextlib.suppress(OSError):
            folder.rmdir()
    with contextlib.suppress(OSError):
        cgroup.rmdir()
