"""Faults of this machine's cluster: signals to processes of Pods, networks cut in the kernel, disks, nodes.

Owns no decision. Each function returns once the fault is there, or, for one that ends by itself, once it is over.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from harness import OPERATOR_NAMESPACE, Cluster, Job, Manifest, execute, python

from chaos.plan import ProcessOf
from rljob_cluster.lifecycle.supervisor import POOLS

_SUBNETS = {pool: f"10.244.{index}.0/24" for index, pool in enumerate(POOLS)}
_TABLE = "rljob_chaos"


def find_processes(cluster: Cluster, job: Job, target: ProcessOf) -> list[int]:
    """Return the processes of a role's Pods that match, as this machine numbers them, Pod by Pod."""
    uids = [pod["metadata"]["uid"] for pod in _find_pods(cluster, job, target.role)]
    matching = [pid for pid in psutil.pids() if target.command in _describe(pid)]
    return [pid for uid in uids for pid in matching if _is_of_pod(pid, uid)]


def _find_pods(cluster: Cluster, job: Job, role: str) -> list[Manifest]:
    if role != "operator":
        return cluster.pods(job.name, role)
    selector = ("-n", OPERATOR_NAMESPACE, "-l", "app.kubernetes.io/name=rljob-operator")
    found: list[Manifest] = cluster.get("pods", *selector)["items"]
    return found


def _is_of_pod(pid: int, uid: str) -> bool:
    with suppress(OSError):
        cgroup = Path(f"/proc/{pid}/cgroup").read_text()
        return uid in cgroup or uid.replace("-", "_") in cgroup
    return False


def _describe(pid: int) -> str:
    with suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return f"{Path(f'/proc/{pid}/comm').read_text().strip()} {command}"
    return ""


def send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


@contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    """Within, the processes do nothing."""
    send(pids, signal.SIGSTOP)
    try:
        yield
    finally:
        send(pids, signal.SIGCONT)


@contextmanager
def network_cut(first: str, second: str) -> Iterator[None]:
    """Within, no packet passes between the Pods of two pools."""
    pairs = [(_SUBNETS[first], _SUBNETS[second]), (_SUBNETS[second], _SUBNETS[first])]
    rules = "; ".join(f"ip saddr {source} ip daddr {target} drop" for source, target in pairs)
    table = f"table ip {_TABLE} {{ chain forward {{ type filter hook forward priority -300; {rules}; }}; }}"
    execute("nft", "-f", "-", input=table.encode())
    try:
        yield
    finally:
        execute("nft", "delete", "table", "ip", _TABLE)


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[None]:
    """Within, the folder is a file system of its own, which can be filled."""
    folder.mkdir(parents=True, exist_ok=True)
    execute("mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=0777", "rljob-chaos", folder)
    try:
        yield
    finally:
        execute("umount", "--lazy", folder)


@contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """Within, the file system of a folder has no free byte."""
    filler = folder / "filler"
    with suppress(OSError), filler.open("wb") as file:
        while True:
            file.write(b"x" * 65536)
            file.flush()
    try:
        yield
    finally:
        filler.unlink(missing_ok=True)


def flip_bit(checkpoint: Path) -> Path:
    """Flip one bit in the middle of the largest file of a checkpoint, and return the file."""
    largest = max((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    return largest


@contextmanager
def frozen_api_server() -> Iterator[None]:
    """Within, the API server answers nothing."""
    pids = [process.pid for process in psutil.process_iter(["name"]) if process.info["name"] == "kube-apiserver"]
    with stopped(pids):
        yield


@contextmanager
def node_without_power(cluster: Cluster, pool: str) -> Iterator[None]:
    python("-m", "rljob_cluster", "power-off", pool)
    try:
        yield
    finally:
        python("-m", "rljob_cluster", "power-on", pool)
        cluster.kubectl("wait", f"node/rljob-{pool}", "--for=condition=Ready", "--timeout=120s")


def drain(cluster: Cluster, job: Job, pool: str) -> None:
    """Evict the job's Pods from the node of a pool, as a drain does."""
    node = f"rljob-{pool}"
    selector = f"--pod-selector=rljob.dev/job={job.name}"
    try:
        flags = ("--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=240s")
        cluster.kubectl("drain", node, selector, *flags)
    finally:
        cluster.kubectl("uncordon", node)
