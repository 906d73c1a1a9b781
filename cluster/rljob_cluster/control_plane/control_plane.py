"""A real control plane as child processes: etcd, the API server and, where asked, controller manager and scheduler.

It owns the processes, their PKI and their data, all under one folder. Nodes are another's (kwok.py).
Invariant: the processes end with the thread that started them, so a test run that is killed leaves none behind.
"""

import hashlib
import http.client
import json
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rljob_cluster.control_plane import pki
from rljob_cluster.host import go_programs
from rljob_cluster.host.commands import die_with_parent

START_SECONDS = 60.0
STOP_SECONDS = 10.0
COMPONENTS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
SERVICE_RANGE = "10.96.0.0/16"
SERVICE_ADDRESS = "10.96.0.1"  # the first of SERVICE_RANGE: Pods reach the API server there
_LOG_LINES = 15


class ControlPlaneError(Exception):
    """A component did not start or did not become ready; the message ends with its last log lines."""


class ControlPlane:
    """`with ControlPlane(folder) as plane:` gives a ready API server and plane.kubeconfig (cluster-admin)."""

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
        if unknown := sorted(set(components) - set(COMPONENTS)):
            raise ControlPlaneError(f"no such component: {', '.join(unknown)}; known are {', '.join(COMPONENTS)}")
        self.folder = folder.resolve()
        self.address = address
        self.api_port = api_port
        self.etcd_port = etcd_port
        self.components = tuple(name for name in COMPONENTS if name in components)
        self._extra = dict(extra_arguments or {})
        self.pki = pki.Pki(self.folder / "pki")
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._programs: Path | None = None

    def serve_nodes(self) -> None:
        """Before start(): be reachable by Pods and kubelets, at an address that is no loopback one."""
        certificate, key = self._kubelet_client
        self._extra["kube-apiserver"] = [
            *self._extra.get("kube-apiserver", ()),
            "--endpoint-reconciler-type=lease",
            "--allow-privileged=true",
            "--kubelet-preferred-address-types=InternalIP",
            f"--kubelet-client-certificate={certificate}",
            f"--kubelet-client-key={key}",
        ]

    @property
    def _kubelet_client(self) -> tuple[Path, Path]:
        self.pki.build_ca()
        return self.pki.certificate("kubelet-client", "kube-apiserver-kubelet-client", ["system:masters"])

    @property
    def server(self) -> str:
        return f"https://{self.address}:{self.api_port}"

    @property
    def kubeconfig(self) -> Path:
        """Cluster-admin's kubeconfig; its user is `admin` in system:masters."""
        return self.kubeconfig_for("admin", ["system:masters"])

    def kubeconfig_for(self, user: str, groups: Sequence[str] = ()) -> Path:
        """A kubeconfig whose client is that user in those groups: what it may do is what RBAC gives it."""
        # Users hold colons and slashes (system:serviceaccount:ns:name), and the groups matter too: name by digest.
        name = "client-" + hashlib.sha256(json.dumps([user, *groups]).encode()).hexdigest()[:16]
        certificate, key = self.pki.certificate(name, user, groups)
        path = self.pki.folder / f"{name}-{self.api_port}.kubeconfig"
        if not path.exists():
            text = pki.build_kubeconfig(
                self.server, self.pki.ca.read_bytes(), certificate.read_bytes(), key.read_bytes()
            )
            path.touch(mode=0o600)
            path.write_text(text)
        return path

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start every component and wait until the API server is ready. Leaves nothing running when it fails."""
        self._programs = go_programs.find_or_build(*self.components)
        for folder in ("logs", "etcd"):
            (self.folder / folder).mkdir(parents=True, exist_ok=True, mode=0o700)
        self.pki.build_ca()
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
        """End every component, the last started first; what they stored stays in the folder."""
        for name in reversed(self.components):
            self._end(name, signal.SIGTERM)

    def kill(self, name: str) -> None:
        """SIGKILL one component, as a crash would; restart() brings it back."""
        self._end(name, signal.SIGKILL)

    def restart(self, name: str) -> None:
        """End one component where it still runs, start it on the same port, and wait until the API is ready."""
        self._end(name, signal.SIGTERM)
        self._start(name)
        if name in ("etcd", "kube-apiserver"):
            self._wait_ready()

    def running(self, name: str) -> bool:
        process = self._processes.get(name)
        return process is not None and process.poll() is None

    def _start(self, name: str) -> None:
        if name not in self.components:
            raise ControlPlaneError(f"{name} is none of this control plane's components: {', '.join(self.components)}")
        if self._programs is None:
            raise ControlPlaneError(f"{name} cannot start before the control plane; call start() first")
        command = [str(self._programs / name), *self._arguments(name), *self._extra.get(name, ())]
        with self._log(name).open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is the parent's to handle, in stop()'s order
                preexec_fn=die_with_parent,
            )

    def _end(self, name: str, first: signal.Signals) -> None:
        process = self._processes.pop(name, None)
        if process is None:
            return
        process.send_signal(first)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            # An API server waits for its watches to end, and a test's watches need not.
            process.kill()
            process.wait()

    def _arguments(self, name: str) -> list[str]:
        if name == "etcd":
            return self._etcd_arguments()
        if name == "kube-apiserver":
            return self._api_arguments()
        kubeconfig = self.kubeconfig_for(f"system:{name}", ["system:masters"])
        # The kubeconfig is trusted for delegated authentication too; no port is served to anybody.
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
        # Port 0: one member needs no peers, so any free port will do.
        peer = f"http://{self.address}:0"
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
        signing = self.pki.key("service-account")
        return [
            f"--etcd-servers=http://{self.address}:{self.etcd_port}",
            f"--bind-address={self.address}",
            f"--advertise-address={self.address}",
            # Endpoints may not be loopback addresses; no Pod runs here that would need them.
            "--endpoint-reconciler-type=none",
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
        context = ssl.create_default_context(cafile=str(self.pki.ca))
        # openssl's bare `req -x509` writes no key identifiers, which Python 3.13 would ask for.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        certificate, key = self.pki.certificate("readiness", "readiness", ["system:masters"])
        context.load_cert_chain(certificate, key)
        deadline = time.monotonic() + START_SECONDS
        answer = "no answer yet"
        while time.monotonic() < deadline:
            for name in ("etcd", "kube-apiserver"):
                if name in self.components and not self.running(name):
                    raise ControlPlaneError(f"{name} ended while it started:\n{self._last_lines(name)}")
            ready, answer = _ask_ready(self.address, self.api_port, context)
            if ready:
                return
            time.sleep(0.05)
        raise ControlPlaneError(
            f"{self.server} was not ready within {START_SECONDS:.0f} s ({answer}):\n"
            f"{self._last_lines('kube-apiserver')}"
        )

    def _log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def _last_lines(self, name: str) -> str:
        try:
            lines = self._log(name).read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return f"(no log at {self._log(name)})"
        return "\n".join([*lines[-_LOG_LINES:], f"(all of it: {self._log(name)})"])


def free_port(address: str) -> int:
    """A port of that address that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port


def _ask_ready(address: str, port: int, context: ssl.SSLContext) -> tuple[bool, str]:
    connection = http.client.HTTPSConnection(address, port, context=context, timeout=5)
    try:
        connection.request("GET", "/readyz")
        response = connection.getresponse()
        return response.status == 200, f"/readyz answered {response.status}: {response.read(300)!r}"
    except (OSError, http.client.HTTPException) as error:
        return False, str(error)
    finally:
        connection.close()
