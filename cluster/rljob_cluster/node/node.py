"""One node: a containerd and a kubelet of its own, with its bridge and subnet, among others on the same machine.

Owns their configuration, made from the node's number alone, so that what one node has no other touches. Starting and
ending the processes is the supervisor's.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rljob_cluster.host.cgroups import cgroup_controllers
from rljob_cluster.host.commands import CommandError, run
from rljob_cluster.images.buildah_store import StoredImage
from rljob_cluster.images.oci_layout import Image, chain_ids, read_archive, write_layout

PAUSE_IMAGE = "rljob.dev/pause:local"
POD_RANGE = "10.244.0.0/16"
DNS_ADDRESS = "10.96.0.10"
RUN = Path("/run/rljob-cluster")
"""Sockets, whose paths must be short."""
LABEL_POOL = "rljob.dev/pool"
_COLLECT = "collect-garbage"
_GC_ROOT = "containerd.io/gc.root"
_CNI_PROGRAMS = Path("/usr/lib/cni")


@dataclass(frozen=True)
class Node:
    """The index-th node of a cluster whose state lies in `state`."""

    index: int
    pool: str
    state: Path

    @property
    def name(self) -> str:
        return f"rljob-{self.pool}"

    @property
    def folder(self) -> Path:
        return self.state / "nodes" / self.pool

    @property
    def address(self) -> str:
        return f"10.244.{self.index}.1"

    @property
    def bridge(self) -> str:
        return f"rljob-br{self.index}"

    @property
    def socket(self) -> Path:
        return RUN / self.pool / "containerd.sock"

    @property
    def is_tainted(self) -> bool:
        """All but the system's node take only Pods that ask for them."""
        return self.pool != "system"

    def prepare(self, ca: Path) -> None:
        """Write the configuration, and make the bridge and the cgroups. May be repeated."""
        for part in ("kubelet", "logs", "cni", "ipam", "containerd"):
            (self.folder / part).mkdir(parents=True, exist_ok=True)
        self.socket.parent.mkdir(parents=True, exist_ok=True)
        (self.folder / "containerd.toml").write_text(self._containerd_config())
        (self.folder / "cni" / "10-bridge.conflist").write_text(json.dumps(self._cni_config()))
        (self.folder / "kubelet.yaml").write_text(yaml.safe_dump(self._kubelet_config(ca)))
        if not Path(f"/sys/class/net/{self.bridge}").exists():
            run("ip", "link", "add", self.bridge, "type", "bridge")
            run("ip", "address", "add", f"{self.address}/24", "dev", self.bridge)
        run("ip", "link", "set", self.bridge, "up")
        for controller in cgroup_controllers():
            cgroup = controller / self.name
            cgroup.mkdir(exist_ok=True)
            for file in ("cpuset.cpus", "cpuset.mems"):
                if (controller / file).exists():
                    (cgroup / file).write_text((controller / file).read_text())

    def prepare_store(self) -> None:
        """Only what its containerd needs: for a store of images that no kubelet uses."""
        for folder in (self.folder / "containerd", self.folder / "cni", self.socket.parent):
            folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "containerd.toml").write_text(self._containerd_config())

    def containerd_command(self) -> list[str]:
        return ["containerd", "--config", str(self.folder / "containerd.toml")]

    def kubelet_command(self, programs: Path, kubeconfig: Path) -> list[str]:
        return [
            str(programs / "kubelet"),
            f"--config={self.folder / 'kubelet.yaml'}",
            f"--kubeconfig={kubeconfig}",
            f"--root-dir={self.folder / 'kubelet'}",
            f"--cert-dir={self.folder / 'kubelet/pki'}",
            f"--hostname-override={self.name}",
            f"--node-ip={self.address}",
            f"--node-labels={LABEL_POOL}={self.pool}",
        ]

    def ctr(self, *arguments: str) -> str:
        return run("ctr", "--address", str(self.socket), "--namespace", "k8s.io", *arguments)

    def list_snapshots(self) -> set[str]:
        return {line.split()[0] for line in self.ctr("snapshots", "list").splitlines()[1:]}

    def import_archive(self, archive: Path) -> None:
        """Import and unpack what is new in the archive; then let its layers go, which containers never read: half of
        the disk."""
        with read_archive(archive) as images:
            self._import(images)
        self._drop_layers()

    def link_image(self, stored: StoredImage) -> None:
        """Take an image out of buildah's store on the same disk: each new layer becomes a snapshot of hard links."""
        unpacked, parent, linked = self.list_snapshots(), "", []
        chains = chain_ids([layer.diff_id for layer in stored.image.layers])
        for folder, chain in zip(stored.folders, chains, strict=True):
            if chain not in unpacked:
                self._link_layer(folder, chain, parent, f"link-{chain}" in unpacked)
                linked.append(chain)
            parent = chain
        self._import([stored.image])
        for chain in linked:
            self.ctr("snapshots", "label", chain, f"{_GC_ROOT}=")  # from now on the image holds it

    def _link_layer(self, folder: Path, chain: str, parent: str, is_left: bool) -> None:
        key = f"link-{chain}"
        if is_left:
            self.ctr("snapshots", "delete", key)
        self.ctr("snapshots", "prepare", key, *filter(None, [parent]))
        mount = self.ctr("snapshots", "mounts", "/nowhere", key)
        upper = re.search(r"upperdir=([^,\s]+)", mount)
        # buildah's store is mounted on itself, and links do not cross mounts: this one look at it is without that.
        script = 'while mountpoint -q "$1"; do umount --lazy "$1"; done; exec cp -al "$2/." "$3"'
        target = upper[1] if upper else mount.split()[3]
        run("unshare", "--mount", "sh", "-c", script, "sh", str(folder.parents[1]), str(folder), target)
        self.ctr("snapshots", "commit", chain, key)

    def _import(self, images: Sequence[Image]) -> None:
        unpacked = self.list_snapshots()
        command = ["ctr", "--address", str(self.socket), "--namespace", "k8s.io", "images", "import", "-"]
        with (
            tempfile.TemporaryFile() as said,
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=said, stderr=subprocess.STDOUT) as process,
        ):
            assert process.stdin
            with contextlib.suppress(BrokenPipeError):  # then it says why below
                write_layout(images, unpacked, process.stdin)
                process.stdin.close()
            if process.wait():
                said.seek(0)
                raise CommandError(f"{images[0].names[0]} is refused by {self.name}: {said.read().decode()[-1500:]}")

    def _drop_layers(self) -> None:
        for line in self.ctr("images", "list").splitlines()[1:]:
            manifest = json.loads(self.ctr("content", "get", line.split()[2]))
            present = set(self.ctr("content", "list", "--quiet").split())
            if layers := sorted({layer["digest"] for layer in manifest.get("layers", ())} & present):
                self.ctr("content", "delete", *layers)
        self.ctr("leases", "create", "--id", _COLLECT)
        self.ctr("leases", "delete", "--sync", _COLLECT)  # returns when garbage is collected

    def _containerd_config(self) -> str:
        # restrict_oom_score_adj: a container without CAP_SYS_RESOURCE may not lower it, and runc would give up.
        return f'''version = 2
root = "{self.folder / "containerd"}"
state = "{self.socket.parent / "state"}"
disabled_plugins = ["io.containerd.internal.v1.opt"]
[grpc]
address = "{self.socket}"
[ttrpc]
address = "{self.socket}.ttrpc"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE_IMAGE}"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{_CNI_PROGRAMS}"
conf_dir = "{self.folder / "cni"}"
[plugins."io.containerd.grpc.v1.cri".containerd]
discard_unpacked_layers = false
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
'''

    def _cni_config(self) -> dict[str, Any]:
        return {
            "cniVersion": "0.4.0",
            "name": self.name,
            "plugins": [
                {
                    "type": "bridge",
                    "bridge": self.bridge,
                    "isGateway": True,
                    "hairpinMode": True,
                    "ipam": {
                        "type": "host-local",
                        "dataDir": str(self.folder / "ipam"),
                        "ranges": [[{"subnet": f"10.244.{self.index}.0/24"}]],
                        "routes": [{"dst": "0.0.0.0/0"}],
                    },
                }
            ],
        }

    def _kubelet_config(self, ca: Path) -> dict[str, Any]:
        taint = {"key": LABEL_POOL, "value": self.pool, "effect": "NoSchedule"}
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": self.address,
            "port": 10250,
            "healthzBindAddress": self.address,
            "healthzPort": 10248,
            "containerRuntimeEndpoint": f"unix://{self.socket}",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.name}",
            "failCgroupV1": False,
            "failSwapOn": False,
            "clusterDNS": [DNS_ADDRESS],
            "clusterDomain": "cluster.local",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": False},
                "x509": {"clientCAFile": str(ca)},
            },
            "authorization": {"mode": "AlwaysAllow"},  # to whom the cluster's own CA has signed
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            "imageGCHighThresholdPercent": 99,
            "imageGCLowThresholdPercent": 98,
            "makeIPTablesUtilChains": False,
            "podLogsDir": str(self.folder / "logs"),
            "volumePluginDir": str(self.folder / "kubelet/plugins"),
            "nodeStatusUpdateFrequency": "5s",
            "serializeImagePulls": False,
            "registerWithTaints": [taint] if self.is_tainted else [],
        }


def copy_store(base: Path, target: Path) -> None:
    """A containerd store as hard links: its blobs and snapshots never change. What is written in place is copied."""
    if target.exists():
        shutil.rmtree(target)
    run("cp", "-al", str(base), str(target))
    for database in base.rglob("*.db"):
        copy = target / database.relative_to(base)
        copy.unlink()
        shutil.copy2(database, copy)
