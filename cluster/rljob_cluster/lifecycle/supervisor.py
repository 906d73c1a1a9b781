"""The process that a cluster lives in: it starts control plane, kube-proxy and nodes, and they end with it.

`up` starts it in the background and waits for its word; `down` ends it and cleans up behind it. A part that dies is
started again, as systemd would on a real node.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import yaml

from rljob_cluster.control_plane.control_plane import ControlPlane
from rljob_cluster.host.commands import CommandError, die_with_parent, run
from rljob_cluster.host.go_programs import find_or_build
from rljob_cluster.images.scratch_image import write_scratch_image
from rljob_cluster.lifecycle import addons, cleanup
from rljob_cluster.node import image_sources
from rljob_cluster.node.node import PAUSE_IMAGE, POD_RANGE, RUN, Node, copy_store

API_ADDRESS = "10.244.255.1"
POOLS = ("system", "trainer", "rollout", "reward")
PROGRAMS = (
    *("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"),
    *("kubelet", "kube-proxy", "kubectl", "coredns", "pause", "helm"),
)
START_SECONDS = 120.0
_RESTART_SECONDS = 1.0


def build_nodes(state: Path) -> list[Node]:
    return [Node(index, pool, state) for index, pool in enumerate(POOLS)]


class Supervisor:
    """One running cluster."""

    def __init__(self, state: Path, image_sources: list[str]) -> None:
        self.state = state
        self.image_sources = image_sources
        self.nodes = build_nodes(state)
        self.programs = find_or_build(*PROGRAMS)
        self._ending = threading.Event()
        self._commands: dict[str, list[str]] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.plane: ControlPlane | None = None

    def serve(self) -> None:
        """Run until SIGTERM."""
        signal.signal(signal.SIGTERM, lambda *_: self._ending.set())
        signal.signal(signal.SIGINT, lambda *_: self._ending.set())
        self._open_network()
        self.plane = self._start_control_plane()
        self._start_nodes()
        self._start("kube-proxy", [str(self.programs / "kube-proxy"), f"--config={self._write_proxy_config()}"])
        manifests = yaml.safe_dump_all(addons.build_coredns())
        self.kubectl("apply", "--server-side", "-f", "-", input=manifests)
        self.kubectl("wait", "node", "--all", "--for=condition=Ready", "--timeout=90s")
        self.kubectl("rollout", "status", "-n", "kube-system", "deployment/coredns", "--timeout=60s")
        (self.state / "run/ready").touch()
        while not self._ending.wait(_RESTART_SECONDS):
            self._restart_dead()
        self._stop()

    def kubectl(self, *arguments: str, input: str | None = None) -> str:
        kubeconfig = str(self.state / "kubeconfig")
        return run(str(self.programs / "kubectl"), "--kubeconfig", kubeconfig, *arguments, input=input)

    def _open_network(self) -> None:
        if not Path(f"/sys/class/net/{cleanup.DEVICE}").exists():
            run("ip", "link", "add", cleanup.DEVICE, "type", "bridge")
            run("ip", "address", "add", f"{API_ADDRESS}/32", "dev", cleanup.DEVICE)
        run("ip", "link", "set", cleanup.DEVICE, "up")
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        rules = f"""table ip {cleanup.NFT_TABLE} {{
            chain postrouting {{
                type nat hook postrouting priority srcnat;
                ip saddr {POD_RANGE} ip daddr != {POD_RANGE} masquerade
            }}
        }}"""
        subprocess.run(["nft", "delete", "table", "ip", cleanup.NFT_TABLE], capture_output=True)
        run("nft", "-f", "-", input=rules)

    def _start_control_plane(self) -> ControlPlane:
        plane = ControlPlane(
            self.state / "control-plane",
            address=API_ADDRESS,
            api_port=6443,
            etcd_port=2379,
            components=("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"),
        )
        plane.serve_nodes()
        plane.start()
        shutil.copyfile(plane.kubeconfig, self.state / "kubeconfig")
        return plane

    def _start_nodes(self) -> None:
        assert self.plane is not None
        base = self._build_store()
        for node in self.nodes:
            node.prepare(self.plane.pki.ca)
            if not (node.folder / "containerd/io.containerd.metadata.v1.bolt").exists():
                copy_store(base.folder / "containerd", node.folder / "containerd")
            self._start(f"containerd-{node.pool}", node.containerd_command())
        for node in self.nodes:
            self._wait_for_containerd(node)
            kubeconfig = self.plane.kubeconfig_for(f"system:node:{node.name}", ["system:nodes"])
            self._start(f"kubelet-{node.pool}", node.kubelet_command(self.programs, kubeconfig))

    def _build_store(self) -> Node:
        """A containerd store with all images in it, imported once, that every node begins with as hard links."""
        assert self.plane is not None
        base = Node(99, "base", self.state)
        marker = base.folder / "imported"
        wanted = "\n".join(self.image_sources)
        if marker.exists() and marker.read_text() == wanted:
            return base
        base.prepare_store()
        self._start("containerd-base", base.containerd_command())
        self._wait_for_containerd(base)
        for archive in self._write_own_images():
            base.import_archive(archive)
        for source in self.image_sources:
            image_sources.load_image(base, source)
        self._end("containerd-base")
        marker.write_text(wanted)
        return base

    def _write_own_images(self) -> list[Path]:
        folder = self.state / "images"
        folder.mkdir(parents=True, exist_ok=True)
        images = {"pause": PAUSE_IMAGE, "coredns": addons.COREDNS_IMAGE}
        for program, image in images.items():
            write_scratch_image(self.programs / program, image, folder / f"{program}.tar")
        return [folder / f"{program}.tar" for program in images]

    def _write_proxy_config(self) -> Path:
        assert self.plane is not None
        kubeconfig = self.plane.kubeconfig_for("system:kube-proxy")
        config = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "nftables",
            "clusterCIDR": POD_RANGE,
            "hostnameOverride": self.nodes[0].name,
            "conntrack": {"maxPerCore": 0},
            "healthzBindAddress": "127.0.0.1:10256",
            "metricsBindAddress": "127.0.0.1:10249",
            "clientConnection": {"kubeconfig": str(kubeconfig)},
        }
        path = self.state / "run/kube-proxy.yaml"
        path.write_text(yaml.safe_dump(config))
        return path

    def _wait_for_containerd(self, node: Node) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                node.ctr("version")
                return
            except CommandError as error:
                if time.monotonic() > deadline:
                    raise CommandError(f"containerd of {node.name} does not answer: {error}") from None
                time.sleep(0.1)

    def _start(self, name: str, command: list[str]) -> None:
        self._commands[name] = command
        folder = self.state / "logs"
        folder.mkdir(exist_ok=True)
        with (folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=die_with_parent
            )

    def _end(self, name: str) -> None:
        process = self._processes.pop(name)
        process.terminate()
        process.wait()

    def _restart_dead(self) -> None:
        for name, process in list(self._processes.items()):
            if process.poll() is not None:
                print(f"{name} ended with {process.returncode}: it is started again", flush=True)
                self._start(name, self._commands[name])

    def _stop(self) -> None:
        for name in reversed(list(self._processes)):
            with contextlib.suppress(ProcessLookupError):
                self._end(name)
        if self.plane:
            self.plane.stop()


def start_in_background(state: Path, image_sources: list[str]) -> int:
    """Start the supervisor and wait until the cluster is ready. Returns its process id."""
    (state / "run").mkdir(parents=True, exist_ok=True)
    (state / "run/ready").unlink(missing_ok=True)
    RUN.mkdir(parents=True, exist_ok=True)
    log = (state / "run/supervisor.log").open("wb")
    command = [sys.executable, "-m", "rljob_cluster", "serve", *image_sources]
    environment = os.environ | {"RLJOB_CLUSTER_DIR": str(state)}
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
    )
    (state / "run/pid").write_text(str(process.pid))
    while not (state / "run/ready").exists():
        if process.poll() is not None:
            raise CommandError(f"the cluster did not start:\n{(state / 'run/supervisor.log').read_text()[-3000:]}")
        time.sleep(0.2)
    return process.pid


def read_pid(state: Path) -> int | None:
    """Process id of the supervisor that runs; None when none does."""
    try:
        pid = int((state / "run/pid").read_text())
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError):
        return None
    return pid if b"rljob_cluster" in command else None


def stop(state: Path) -> None:
    """End the supervisor, and leave nothing of the cluster behind."""
    pid = read_pid(state)
    if pid is not None:
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + START_SECONDS
        while read_pid(state) is not None and time.monotonic() < deadline:
            time.sleep(0.1)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    cleanup.remove_everything(build_nodes(state), state)

