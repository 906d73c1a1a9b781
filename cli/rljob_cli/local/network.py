"""Addresses, ports and names of a run: one loopback block 127.X.Y.0/24 per run, one address of it per Pod, one offset
for the ports of all Pods, a hosts file.

A run holds its block with a listening socket, so that two runs never share one. The kernel releases it even if the run
is killed. Other programs may listen on all addresses of the machine, as many do on 8000 and 8080. So a run shifts its
ports to a range that few use. Invariant: one identity keeps its address for the whole run, including restarts.
"""

import ipaddress
import socket
import zlib
from collections.abc import Iterable

from rljob_api.errors import UserError
from rljob_api.wire import contract
from rljob_cli.manifests import is_ready, labels_of, namespace_of, phase_of
from rljob_core.backend import Manifest
from rljob_core.plan.observed_job import is_terminating, name_of

_LOCK_PORT = 6377
_LOCK_HOST = 254
_FIRST_HOST = 1
_NUM_CANDIDATE_BLOCKS = 32
# Many programs use 127.0, and some tools the upper end.
_SECOND_BYTES = range(32, 224)
# Shifted ports are here: below those that the kernel gives to outgoing connections.
_RANGE = range(20_000, 30_000)
_OFFSETS = range(_RANGE.start - min(contract.PORTS), _RANGE.stop - max(contract.PORTS))
_NUM_CANDIDATE_OFFSETS = 256
_MAX_ENGINES = 16
"""Rollout replicas in one trainer Pod: the most GPUs that a Pod may have. They listen at adjacent ports."""
_NEEDED = {*contract.PORTS, *range(contract.PORT_ROLLOUT, contract.PORT_ROLLOUT + _MAX_ENGINES)}


class Network:
    def __init__(self, prefix: str, lock: socket.socket) -> None:
        self.prefix = prefix
        self._offset = _find_offset(prefix)
        self._lock = lock
        self._addresses: dict[str, str] = {}

    def address(self, identity: str) -> str:
        if identity not in self._addresses:
            host = _FIRST_HOST + len(self._addresses)
            if host >= _LOCK_HOST:
                raise UserError(f"all {host - 1} addresses of {self.prefix}.0/24 are in use; use fewer replicas")
            self._addresses[identity] = f"{self.prefix}.{host}"
        return self._addresses[identity]

    @property
    def environment(self) -> dict[str, str]:
        """Variables for the programs of all Pods."""
        return {contract.ENV_PORT_OFFSET: str(self._offset)}

    def port(self, port: int) -> int:
        """Return where Pods listen instead of `port`, which a probe names. Ports that RLJob does not know belong to
        the user's containers, and stay."""
        return port + self._offset if port in contract.PORTS else port

    def close(self) -> None:
        self._lock.close()


def claim_block(seed: str, block: str | None = None) -> Network:
    """Claim `block` (127.X.Y.0), or else a free block, starting the search at a place that depends on the seed."""
    for prefix in [_prefix_of(block)] if block else _candidates(seed):
        if lock := _listen(f"{prefix}.{_LOCK_HOST}", _LOCK_PORT):
            return Network(prefix, lock)
    if block:
        raise UserError(f"--network {block} belongs to another `rljob run`; wait for its end, or leave out --network")
    raise UserError(f"no free block of loopback addresses among {_NUM_CANDIDATE_BLOCKS}; set one with --network")


def _find_offset(prefix: str) -> int:
    """Return an offset that shifts each port to one that is free on all addresses. The search depends on the block, so
    that runs differ: Ray's head listens on all addresses."""
    _, second, third = (int(part) for part in prefix.split("."))
    for number in range(_NUM_CANDIDATE_OFFSETS):
        offset = _OFFSETS[(second * 256 + third + number) % len(_OFFSETS)]
        if all(_is_free(port + offset) for port in _NEEDED):
            return offset
    raise UserError(
        f"too many ports between {_RANGE.start} and {_RANGE.stop} are in use: a run needs {len(_NEEDED)}; "
        "stop some of the processes that listen there"
    )


def _is_free(port: int) -> bool:
    """Whether no program listens at the port, on any address."""
    if probe := _listen("0.0.0.0", port):
        probe.close()
    return probe is not None


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
