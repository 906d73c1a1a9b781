"""Removes what a cluster leaves on the machine outside its folder: Pods, mounts, interfaces, rules, cgroups.

Everything is found by the cluster's own names, so that other clusters on the machine are never touched.
"""

import contextlib
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from rljob_cluster.host.cgroups import find_cgroups
from rljob_cluster.host.commands import try_run
from rljob_cluster.node.node import RUN, Node

API_BRIDGE = "rljob-api"
"""The interface with the API server's address."""
NFT_TABLE = "rljob-cluster"
_CNI_RESULTS = Path("/var/lib/cni/results")
_NETWORK_NAMESPACES = Path("/var/run/netns")
_KILL_TIMEOUT_SECONDS = 20.0


def remove_everything(nodes: Sequence[Node], state: Path) -> None:
    """Restore the machine to its state before the cluster. Idempotent; also works after a crash."""
    kill_pods(nodes)
    for path in sorted(_mounts_below(RUN, state), reverse=True):
        try_run("umount", "--lazy", path)
    for node in nodes:
        _remove_network_namespaces(node)
        try_run("ip", "link", "delete", node.bridge)
        for cgroup in find_cgroups(node.name):
            _remove_cgroup(cgroup)
    try_run("ip", "link", "delete", API_BRIDGE)
    for family, table in (("ip", NFT_TABLE), ("ip", "kube-proxy"), ("ip6", "kube-proxy")):
        try_run("nft", "delete", "table", family, table)
    shutil.rmtree(RUN, ignore_errors=True)
    for part in ("nodes", "control-plane", "run"):
        shutil.rmtree(state / part, ignore_errors=True)


def kill_pods(nodes: Sequence[Node]) -> None:
    """Kill the processes of the containers of these nodes."""
    deadline = time.monotonic() + _KILL_TIMEOUT_SECONDS
    while (processes := _find_processes(nodes)) and time.monotonic() < deadline:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.1)


def _find_processes(nodes: Sequence[Node]) -> list[psutil.Process]:
    """The processes in the cgroups of the nodes, and containerd's shims, which outlive it; each names its socket."""
    pids: set[int] = set()
    for node in nodes:
        for cgroup in find_cgroups(node.name):
            for procs in cgroup.rglob("cgroup.procs"):
                with contextlib.suppress(OSError):
                    pids.update(map(int, procs.read_text().split()))
    folders = tuple(f"{node.socket.parent}/" for node in nodes)
    return [p for p in psutil.process_iter(["cmdline"]) if p.pid in pids or _is_shim(p, folders)]


def _is_shim(process: psutil.Process, folders: tuple[str, ...]) -> bool:
    arguments = process.info["cmdline"] or [""]
    return "containerd-shim" in arguments[0] and any(argument.startswith(folders) for argument in arguments)


def _mounts_below(*folders: Path) -> list[str]:
    points = [partition.mountpoint for partition in psutil.disk_partitions(all=True)]
    return [point for point in points if any(point.startswith(f"{folder}/") for folder in folders)]


def _remove_network_namespaces(node: Node) -> None:
    """CNI records the network namespace of each Pod."""
    for result in _CNI_RESULTS.glob(f"{node.name}-*"):
        with contextlib.suppress(OSError, ValueError):
            namespace = Path(json.loads(result.read_text()).get("netns") or "")
            if namespace.parent.resolve() == _NETWORK_NAMESPACES.resolve():
                try_run("ip", "netns", "delete", namespace.name)
        result.unlink(missing_ok=True)


def _remove_cgroup(cgroup: Path) -> None:
    for folder in sorted(cgroup.glob("**"), reverse=True):
        with contextlib.suppress(OSError):
            folder.rmdir()
