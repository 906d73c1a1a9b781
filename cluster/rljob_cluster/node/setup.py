"""Prepares what a node needs on this machine: configuration files, a bridge, cgroups, and a store of images."""

import json
import shutil
from pathlib import Path

import psutil
import yaml

from rljob_cluster.host.cgroups import cgroup_controllers
from rljob_cluster.host.commands import run
from rljob_cluster.node.config import build_cni_config, build_containerd_config, build_kubelet_config
from rljob_cluster.node.node import Node


def prepare_node(node: Node, ca: Path) -> None:
    """Write the configuration, and create the bridge and the cgroups. Idempotent."""
    prepare_store(node)
    for part in ("kubelet", "logs", "ipam"):
        (node.folder / part).mkdir(exist_ok=True)
    (node.folder / "cni" / "10-bridge.conflist").write_text(json.dumps(build_cni_config(node)))
    (node.folder / "kubelet.yaml").write_text(yaml.safe_dump(build_kubelet_config(node, ca)))
    add_bridge(node.bridge, f"{node.address}/24")
    for controller in cgroup_controllers():
        cgroup = controller / node.name
        cgroup.mkdir(exist_ok=True)
        for file in ("cpuset.cpus", "cpuset.mems"):
            if (controller / file).exists():
                (cgroup / file).write_text((controller / file).read_text())


def prepare_store(node: Node) -> None:
    """Only what its containerd needs; enough for a store of images that no kubelet uses."""
    for folder in (node.folder / "containerd", node.folder / "cni", node.socket.parent):
        folder.mkdir(parents=True, exist_ok=True)
    (node.folder / "containerd.toml").write_text(build_containerd_config(node))


def add_bridge(name: str, address: str) -> None:
    if name not in psutil.net_if_addrs():
        run("ip", "link", "add", name, "type", "bridge")
        run("ip", "address", "add", address, "dev", name)
    run("ip", "link", "set", name, "up")


def copy_store(base: Path, target: Path) -> None:
    """Copy a containerd store as hard links: blobs and snapshots are immutable. Databases are real copies."""
    if target.exists():
        shutil.rmtree(target)
    run("cp", "-al", str(base), str(target))
    for database in base.rglob("*.db"):
        copy = target / database.relative_to(base)
        copy.unlink()
        shutil.copy2(database, copy)
