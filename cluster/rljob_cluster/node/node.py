"""The names, addresses, folders and commands of one node, derived from its index and pool.

A node is one containerd and one kubelet with separate sockets, bridge, subnet and cgroup, so that several fit on one
machine. The supervisor starts and stops the processes.
"""

from dataclasses import dataclass
from pathlib import Path

PAUSE_IMAGE = "rljob.dev/pause:local"
POD_RANGE = "10.244.0.0/16"
DNS_ADDRESS = "10.96.0.10"
RUN = Path("/run/rljob-cluster")
"""Sockets; their paths must be short."""
LABEL_POOL = "rljob.dev/pool"


@dataclass(frozen=True)
class Node:
    """The node with number `index` in the cluster whose state folder is `state`."""

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
        """All nodes except the system's accept only Pods that request them."""
        return self.pool != "system"

    def containerd_command(self) -> list[str]:
        return ["containerd", "--config", str(self.folder / "containerd.toml")]

    def ctr_command(self, *arguments: str) -> list[str]:
        return ["ctr", "--address", str(self.socket), "--namespace", "k8s.io", *arguments]

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
