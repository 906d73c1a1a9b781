"""A real control plane as child processes: etcd, the API server and, on request, controller manager and scheduler.

It owns the processes, their PKI and their data, all in one folder; kwok.py and the node folder add nodes. Pods and
kubelets need an address that is not a loopback one.
The invariant: the processes end with the thread that started them, so that a killed test run leaves none behind.
"""

import contextlib
import hashlib
import ipaddress
import json
import random
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from rljob_cluster.control_plane import pki
from rljob_cluster.host import go_programs
from rljob_cluster.host.commands import ClusterError, run
from rljob_cluster.host.processes import ProcessGroup

START_TIMEOUT_SECONDS = 60.0
COMPONENTS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
SERVICE_RANGE = "10.96.0.0/16"
SERVICE_ADDRESS = "10.96.0.1"  # the first of SERVICE_RANGE: Pods reach the API server there


class ControlPlane:
    """`with ControlPlane(folder) as plane:` starts an API server; plane.kubeconfig belongs to a cluster-admin."""

    def __init__(
        self,
        folder: Path,
        *,
        address: str = "127.0.0.1",
        api_port: int = 0,
        etcd_port: int = 0,
        components: Sequence[str] = ("etcd", "kube-apiserver"),
        extra_arguments: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.folder = folder.resolve()
        self.address, self.api_port, self.etcd_port = address, api_port, etcd_port
        self.components = tuple(name for name in COMPONENTS if name in components)
        self._extra = dict(extra_arguments or {})
        self.pki = pki.Pki(self.folder / "pki")
        self.processes = ProcessGroup(self.folder / "logs")

    @property
    def server(self) -> str:
        return f"https://{self.address}:{self.api_port}"

    @property
    def kubeconfig(self) -> Path:
        """The kubeconfig of a cluster-admin: user `admin` in system:masters."""
        return self.kubeconfig_for("admin", ["system:masters"])

    def kubeconfig_for(self, user: str, groups: Sequence[str] = ()) -> Path:
        """A kubeconfig for this user in these groups; RBAC decides what it allows."""
        # A digest, since users may contain colons and slashes (system:serviceaccount:ns:name), and groups matter too.
        name = "client-" + hashlib.sha256(json.dumps([user, *groups]).encode()).hexdigest()[:16]
        certificate, key = self.pki.certificate(name, user, groups)
        path = self.pki.folder / f"{name}-{self.api_port}.kubeconfig"
        if not path.exists():
            path.touch(mode=0o600)
            path.write_text(pki.build_kubeconfig(self.server, self.pki.ca, certificate, key))
        return path

    def kubectl(self, *arguments: str, input: str | None = None) -> str:
        program = str(go_programs.programs_folder() / "kubectl")
        return run(program, f"--kubeconfig={self.kubeconfig}", *arguments, input=input)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start every component and wait until the API server is ready. Stop all of them if that fails."""
        go_programs.find_or_build(*self.components, "kubectl")
        (self.folder / "etcd").mkdir(parents=True, exist_ok=True, mode=0o700)
        self.api_port = self.api_port or free_port(self.address)
        self.etcd_port = self.etcd_port or free_port(self.address)
        try:
            for name in self.components:
                self._start(name)
                if name == "kube-apiserver":
                    self._wait_ready()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop every component, the last started first; their data stays in the folder."""
        self.processes.stop_all()

    def restart(self, name: str) -> None:
        """Stop one component if it runs, start it on the same port, and wait until the API server is ready."""
        self.processes.stop(name)
        self._start(name)
        if name in ("etcd", "kube-apiserver"):
            self._wait_ready()

    def _start(self, name: str) -> None:
        program = go_programs.programs_folder() / name
        self.processes.start(name, [str(program), *self._arguments(name), *self._extra.get(name, ())])

    def _arguments(self, name: str) -> list[str]:
        if name == "etcd":
            return self._etcd_arguments()
        if name == "kube-apiserver":
            return self._api_arguments()
        kubeconfig = self.kubeconfig_for(f"system:{name}", ["system:masters"])
        # The kubeconfig is trusted for delegated authentication too, since no port is open.
        common = [f"--kubeconfig={kubeconfig}", "--leader-elect=false", "--secure-port=0"]
        if name == "kube-scheduler":
            return common
        return [
            *common,
            f"--service-account-private-key-file={self.pki.key('service-account')}",
            f"--root-ca-file={self.pki.ca}",
            "--use-service-account-credentials=true",
        ]

    def _etcd_arguments(self) -> list[str]:
        client = f"http://{self.address}:{self.etcd_port}"
        peer = f"http://{self.address}:0"  # a single member has no peers, so any free port works
        return [
            "--name=rljob",
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=rljob={peer}",
            "--unsafe-no-fsync",
            "--log-level=warn",
        ]

    def _api_arguments(self) -> list[str]:
        hosts = [self.address, "localhost", SERVICE_ADDRESS, "kubernetes.default.svc"]
        certificate, key = self.pki.certificate("kube-apiserver", "kube-apiserver", hosts=hosts)
        client = self.pki.certificate("kubelet-client", "kube-apiserver-kubelet-client", ["system:masters"])
        signing = self.pki.key("service-account")
        # Endpoints, by which Pods reach the API server, must not be loopback addresses.
        reconciler = "none" if ipaddress.ip_address(self.address).is_loopback else "lease"
        return [
            f"--etcd-servers=http://{self.address}:{self.etcd_port}",
            f"--bind-address={self.address}",
            f"--advertise-address={self.address}",
            f"--endpoint-reconciler-type={reconciler}",
            "--allow-privileged=true",
            "--kubelet-preferred-address-types=InternalIP",
            f"--kubelet-client-certificate={client[0]}",
            f"--kubelet-client-key={client[1]}",
            f"--secure-port={self.api_port}",
            f"--tls-cert-file={certificate}",
            f"--tls-private-key-file={key}",
            f"--client-ca-file={self.pki.ca}",
            "--authorization-mode=Node,RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={signing}",
            f"--service-account-signing-key-file={signing}",
            f"--service-cluster-ip-range={SERVICE_RANGE}",
            "--shutdown-delay-duration=0s",
        ]

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while True:
            for name in ("etcd", "kube-apiserver"):
                if name in self.components and not self.processes.is_running(name):
                    raise ClusterError(f"{name} exited during startup:\n{self.processes.last_lines(name)}")
            try:
                self.kubectl("get", "--raw=/readyz", "--request-timeout=5s")
                return
            except ClusterError as error:
                if time.monotonic() > deadline:
                    log = self.processes.last_lines("kube-apiserver")
                    raise ClusterError(f"{self.server}: not ready: {error}\n{log}") from None
                time.sleep(0.05)


def free_port(address: str) -> int:
    """Return a port below those that the kernel gives to connections, which could take it before its server does."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((address, port))
            return port
