"""Addresses and names of a run: one loopback block 127.X.Y.0/24 per run, one address of it per Pod, a hosts file.

A run holds its block with a listening socket, so that two runs never share one. The kernel releases it even if the run
is killed. Invariant: one identity keeps its address for the whole run, including restarts.
"""

import contextlib
import ipaddress
import socket
import zlib
from collections.abc import Iterable

import psutil

from rljob_api.errors import UserError
from rljob_api.wire import contract
from rljob_cli.manifests import is_ready, labels_of, namespace_of, phase_of
from rljob_operator.backend import Manifest
from rljob_operator.plan.observed_job import is_terminating, name_of

PORTS = (
    contract.PORT_DRIVER,
    contract.PORT_WEIGHTS,
    contract.PORT_ROLLOUT,
    contract.PORT_REWARD,
    contract.PORT_GATEWAY,
)
_LOCK_PORT = 6377
_LOCK_HOST = 254
_FIRST_HOST = 1
_PROBED_HOSTS = range(_FIRST_HOST, 9)
_NUM_CANDIDATE_BLOCKS = 32
# Many programs use 127.0, and some tools the upper end.
_SECOND_BYTES = range(32, 224)
# Below the ports that the kernel gives to outgoing connections.
_RAY_PORTS = range(20_000, 30_000)


class Network:
    def __init__(self, prefix: str, lock: socket.socket) -> None:
        self.prefix = prefix
        self.ray_port = _find_ray_port(prefix)
        self._lock = lock
        self._addresses: dict[str, str] = {}

    def address(self, identity: str) -> str:
        if identity not in self._addresses:
            host = _FIRST_HOST + len(self._addresses)
            if host >= _LOCK_HOST:
                raise UserError(f"all {host - 1} addresses of {self.prefix}.0/24 are in use; use fewer replicas")
            self._addresses[identity] = f"{self.prefix}.{host}"
        return self._addresses[identity]

    def close(self) -> None:
        self._lock.close()


def claim_block(seed: str, block: str | None = None, ports: Iterable[int] = PORTS) -> Network:
    """Claim `block` (127.X.Y.0), or else a free block, starting the search at a place that depends on the seed."""
    ports = tuple(ports)
    prefixes = [_prefix_of(block)] if block else list(_candidates(seed))
    refusal = ""
    for prefix in prefixes:
        lock = _listen(f"{prefix}.{_LOCK_HOST}", _LOCK_PORT)
        if lock is None:
            refusal = f"{prefix}.0/24 belongs to another `rljob run`"
            continue
        used = find_used(prefix, ports)
        if used is None:
            return Network(prefix, lock)
        lock.close()
        refusal = f"port {used[1]} on {used[0]} is in use{_describe_listener(*used)}"
    remedy = "stop the process that listens there" + (", or leave out --network" if block else "")
    raise UserError(f"{refusal}; {remedy}")


def find_used(prefix: str, ports: Iterable[int]) -> tuple[str, int] | None:
    """Return the first (address, port) in use among the block's low addresses."""
    for port in ports:
        for host in _PROBED_HOSTS:
            probe = _listen(f"{prefix}.{host}", port)
            if probe is None:
                return f"{prefix}.{host}", port
            probe.close()
    return None


def _find_ray_port(prefix: str) -> int:
    """Return a port for Ray's head, which listens on all addresses. It depends on the block, so that runs differ."""
    _, second, third = (int(part) for part in prefix.split("."))
    start = (second * 256 + third) % len(_RAY_PORTS)
    for port in (*_RAY_PORTS[start:], *_RAY_PORTS[:start]):
        if probe := _listen("0.0.0.0", port):
            probe.close()
            return port
    return contract.PORT_RAY


def _prefix_of(block: str) -> str:
    try:
        network = ipaddress.ip_network(f"{block.removesuffix('/24')}/24")
    except ValueError as error:
        raise UserError(f"--network must be a loopback block like 127.40.1.0, got {block}: {error}") from None
    if not network.is_loopback:
        raise UserError(f"--network must be a loopback block like 127.40.1.0, got {block}")
    return str(network.network_address).rpartition(".")[0]


def _candidates(seed: str) -> Iterable[str]:
    start = zlib.crc32(seed.encode())
    for i in range(_NUM_CANDIDATE_BLOCKS):
        number = (start + i * 7919) % (len(_SECOND_BYTES) * 256)
        yield f"127.{_SECOND_BYTES[number // 256]}.{number % 256}"


def _listen(address: str, port: int) -> socket.socket | None:
    """Return a listening socket; None if the address is in use. Connections in TIME_WAIT do not count."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen(1)
    except OSError:
        listener.close()
        return None
    return listener


def _describe_listener(address: str, port: int) -> str:
    """Return ' by NAME (pid N)'; empty if this user may not see the process."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp4"):
            is_listening = connection.status == psutil.CONN_LISTEN and connection.pid
            if is_listening and tuple(connection.laddr) in ((address, port), ("0.0.0.0", port)):
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return ""


def build_hosts(services: Iterable[Manifest], pods: Iterable[Manifest]) -> str:
    """Return headless Services as a hosts file, as cluster DNS would resolve them: a name resolves only to ready Pods,
    unless the Service sets publishNotReadyAddresses. Pods of StatefulSets also get POD.SERVICE."""
    lines, ended = [], ("Succeeded", "Failed")
    alive = [p for p in pods if p.get("status", {}).get("podIP") and phase_of(p) not in ended and not is_terminating(p)]
    for service in services:
        spec = service["spec"]
        full = f"{name_of(service)}.{namespace_of(service)}"
        for pod in alive:
            is_selected = spec["selector"].items() <= labels_of(pod).items()
            if not is_selected or not (spec.get("publishNotReadyAddresses") or is_ready(pod)):
                continue
            names = [name_of(service), full, f"{full}.svc", f"{full}.svc.cluster.local"]
            if pod["spec"].get("subdomain", name_of(service)) == name_of(service):
                hostname = pod["spec"].get("hostname", name_of(pod))
                names += [f"{hostname}.{name}" for name in names]
            lines.append(f"{pod['status']['podIP']} {' '.join(names)}")
    return "".join(f"{line}\n" for line in sorted(set(lines)))
