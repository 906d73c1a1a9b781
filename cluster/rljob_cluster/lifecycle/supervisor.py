"""The process that owns a cluster: it starts control plane, kube-proxy and nodes, and restarts parts that die.

All parts end with it. `up` starts it in the background and waits until it is ready; `down` stops it and cleans up.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import yaml

from rljob_cluster.control_plane.control_plane import COMPONENTS, ControlPlane
from rljob_cluster.host.commands import ClusterError, run
from rljob_cluster.host.go_programs import find_or_build
from rljob_cluster.host.processes import ProcessGroup
from rljob_cluster.images.oci_layout import build_program_image
from rljob_cluster.lifecycle import addons, cleanup
from rljob_cluster.node.image_sources import load_image
from rljob_cluster.node.image_store import ctr, import_images
from rljob_cluster.node.node import PAUSE_IMAGE, POD_RANGE, RUN, Node
from rljob_cluster.node.setup import add_bridge, copy_store, prepare_node, prepare_store

API_ADDRESS = "10.244.255.1"
POOLS = ("system", "trainer", "rollout", "reward")
PROGRAMS = (*COMPONENTS, "kubelet", "kube-proxy", "kubectl", "coredns", "pause", "helm")
START_TIMEOUT_SECONDS = 120.0
_RESTART_DELAY_SECONDS = 1.0


def build_nodes(state: Path) -> list[Node]:
    return [Node(index, pool, state) for index, pool in enumerate(POOLS)]


class Supervisor:
    """One running cluster."""

    def __init__(self, state: Path, image_sources: list[str]) -> None:
        self.state, self.image_sources = state, image_sources
        self.nodes, self.programs = build_nodes(state), find_or_build(*PROGRAMS)
        self._stopping = threading.Event()
        self._processes = ProcessGroup(state / "logs")
        self._plane = ControlPlane(
            state / "control-plane", address=API_ADDRESS, api_port=6443, etcd_port=2379, components=COMPONENTS
        )

    def serve(self) -> None:
        """Run until SIGTERM."""
        signal.signal(signal.SIGTERM, lambda *_: self._stopping.set())
        signal.signal(signal.SIGINT, lambda *_: self._stopping.set())
        self._open_network()
        self._plane.start()
        shutil.copyfile(self._plane.kubeconfig, self.state / "kubeconfig")
        self._start_nodes()
        self._processes.start(
            "kube-proxy", [str(self.programs / "kube-proxy"), f"--config={self._write_proxy_config()}"]
        )
        self._plane.kubectl("apply", "--server-side", "-f", "-", input=yaml.safe_dump_all(addons.build_coredns()))
        nodes = [f"node/{node.name}" for node in self.nodes]
        for node in nodes:  # one by one: of several that have not registered yet, kubectl fails at once
            self._plane.kubectl("wait", node, "--for=create", "--timeout=60s")
        self._plane.kubectl("wait", *nodes, "--for=condition=Ready", "--timeout=90s")
        self._plane.kubectl("rollout", "status", "-n", "kube-system", "deployment/coredns", "--timeout=60s")
        (self.state / "run/ready").touch()
        while not self._stopping.wait(_RESTART_DELAY_SECONDS):
            self._switch_nodes()
            self._processes.restart_dead()
        self._processes.stop_all()
        self._plane.stop()

    def _open_network(self) -> None:
        add_bridge(cleanup.API_BRIDGE, f"{API_ADDRESS}/32")
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        rules = f"""table ip {cleanup.NFT_TABLE} {{
            chain postrouting {{
                type nat hook postrouting priority srcnat;
                ip saddr {POD_RANGE} ip daddr != {POD_RANGE} masquerade
            }}
        }}"""
        subprocess.run(["nft", "delete", "table", "ip", cleanup.NFT_TABLE], capture_output=True)
        run("nft", "-f", "-", input=rules)

    def _start_nodes(self) -> None:
        base = self._build_store()
        for node in self.nodes:
            prepare_node(node, self._plane.pki.ca)
            if not (node.folder / "containerd/io.containerd.metadata.v1.bolt").exists():
                copy_store(base.folder / "containerd", node.folder / "containerd")
            self._processes.start(f"containerd-{node.pool}", node.containerd_command())
        for node in self.nodes:
            self._start_kubelet(node)

    def _start_kubelet(self, node: Node) -> None:
        _wait_for_containerd(node)
        kubeconfig = self._plane.kubeconfig_for(f"system:node:{node.name}", ["system:nodes"])
        self._processes.start(f"kubelet-{node.pool}", node.kubelet_command(self.programs, kubeconfig))

    def _switch_nodes(self) -> None:
        """Make the power of each node what `set_power` has asked for."""
        for node in self.nodes:
            switch, is_on = power_switch(self.state, node.pool), self._processes.is_running(f"kubelet-{node.pool}")
            if switch.exists() and is_on:
                for process in ("kubelet", "containerd"):
                    self._processes.stop(f"{process}-{node.pool}", signal.SIGKILL)
                cleanup.kill_pods([node])
                switch.with_suffix(".off").touch()
            elif not switch.exists() and switch.with_suffix(".off").exists():
                self._processes.start(f"containerd-{node.pool}", node.containerd_command())
                self._start_kubelet(node)
                switch.with_suffix(".off").unlink()

    def _build_store(self) -> Node:
        """A containerd store with all images, imported once; every node starts with hard links to it."""
        base = Node(99, "base", self.state)
        marker = base.folder / "imported"
        sources = "\n".join(self.image_sources)
        if marker.exists() and marker.read_text() == sources:
            return base
        prepare_store(base)
        self._processes.start("containerd-base", base.containerd_command())
        _wait_for_containerd(base)
        for program, image in (("pause", PAUSE_IMAGE), ("coredns", addons.COREDNS_IMAGE)):
            import_images(base, [build_program_image(self.programs / program, image)])
        for source in self.image_sources:
            load_image(base, source)
        self._processes.stop("containerd-base")
        marker.write_text(sources)
        return base

    def _write_proxy_config(self) -> Path:
        config = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "nftables",
            "clusterCIDR": POD_RANGE,
            "hostnameOverride": self.nodes[0].name,
            "conntrack": {"maxPerCore": 0},
            "healthzBindAddress": "127.0.0.1:10256",
            "metricsBindAddress": "127.0.0.1:10249",
            "clientConnection": {"kubeconfig": str(self._plane.kubeconfig_for("system:kube-proxy"))},
        }
        path = self.state / "run/kube-proxy.yaml"
        path.write_text(yaml.safe_dump(config))
        return path


def _wait_for_containerd(node: Node) -> None:
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while True:
        try:
            ctr(node, "version")
            return
        except ClusterError as error:
            if time.monotonic() > deadline:
                raise ClusterError(f"{node.name}: containerd does not answer: {error}") from None
            time.sleep(0.1)


def start_in_background(state: Path, image_sources: list[str]) -> None:
    (state / "run").mkdir(parents=True, exist_ok=True)
    (state / "run/ready").unlink(missing_ok=True)
    RUN.mkdir(parents=True, exist_ok=True)
    log_path = state / "run/supervisor.log"
    command = [sys.executable, "-m", "rljob_cluster", "serve", *image_sources]
    environment = os.environ | {"RLJOB_CLUSTER_DIR": str(state)}
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
    (state / "run/pid").write_text(str(process.pid))
    while not (state / "run/ready").exists():
        if process.poll() is not None:
            raise ClusterError(f"the cluster did not start:\n{log_path.read_text()[-3000:]}")
        time.sleep(0.2)


def power_switch(state: Path, pool: str) -> Path:
    """Exists while the node of this pool must be off; with the suffix .off, while it is."""
    return state / "run" / f"power-{pool}"


def set_power(state: Path, pool: str, *, on: bool) -> None:
    """End a node's kubelet, containerd and containers at once and without a word to the API server, as a machine that
    loses its power; or start them again. Returns when it is done."""
    switch = power_switch(state, pool)
    if on:
        switch.unlink(missing_ok=True)
    else:
        switch.touch()
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while switch.with_suffix(".off").exists() == on:
        if time.monotonic() > deadline:
            raise ClusterError(f"node {pool} was not switched in {START_TIMEOUT_SECONDS:.0f} s; see run/supervisor.log")
        time.sleep(0.1)


def find_process(state: Path) -> psutil.Process | None:
    """The running supervisor of this state folder; None if it does not run."""
    try:
        process = psutil.Process(int((state / "run/pid").read_text()))
        is_supervisor = any("rljob_cluster" in argument for argument in process.cmdline())
    except (OSError, ValueError, psutil.Error):
        return None
    return process if is_supervisor else None


def stop(state: Path) -> None:
    """Stop the supervisor, and remove everything that the cluster created."""
    process = find_process(state)
    if process is not None:
        process.terminate()
        with contextlib.suppress(psutil.TimeoutExpired):
            process.wait(START_TIMEOUT_SECONDS)
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    cleanup.remove_everything(build_nodes(state), state)
