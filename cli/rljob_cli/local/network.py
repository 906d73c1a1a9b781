"""Addresses of a run: one block 127.X.Y.0/24 of its own, and one address of it for each Pod.

A run holds its block by a listening socket for as long as it lives, so that two runs never share one; the kernel gives
the block back however the run ends. Invariant: one identity keeps its address for the whole run, restarts included.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import zlib
from collections.abc import Iterable
from pathlib import Path

from rljob_api.errors import UserError
from rljob_api.wire import contract

PORTS = (
    contract.PORT_DRIVER,
    contract.PORT_WEIGHTS,
    contract.PORT_ROLLOUT,
    contract.PORT_REWARD,
)
_LOCK_PORT = 6377
_LOCK_HOST = 254
_FIRST_HOST = 1
_PROBED_HOSTS = range(_FIRST_HOST, 9)
_CANDIDATE_BLOCKS = 32
# 127.0 is everybody's, and the upper end is where other tools put their own.
_SECOND_BYTES = range(32, 224)
# Below the ports that the kernel gives to outgoing connections.
_RAY_PORTS = range(20_000, 30_000)


class Network:
    """A claimed block."""

    def __init__(self, prefix: str, lock: socket.socket) -> None:
        self.prefix = prefix
        self.ray_port = _find_ray_port(prefix)
        self._lock = lock
        self._addresses: dict[str, str] = {}

    def address(self, identity: str) -> str:
        """The identity's address; a new one when it has none yet."""
        if identity not in self._addresses:
            taken = set(self._addresses.values())
            hosts = (f"{self.prefix}.{host}" for host in range(_FIRST_HOST, _LOCK_HOST))
            address = next((a for a in hosts if a not in taken), None)
            if address is None:
                raise UserError(f"all {len(taken)} addresses of {self.prefix}.0/24 are taken; use fewer replicas")
            self._addresses[identity] = address
        return self._addresses[identity]

    def close(self) -> None:
        self._lock.close()


def claim_block(seed: str, block: str | None = None, ports: Iterable[int] = PORTS) -> Network:
    """Claim `block` (127.X.Y.0), or a free one that begins at a place which depends on the seed alone."""
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
        refusal = f"port {used[1]} on {used[0]} is in use{_describe_listener(used[1])}"
    remedy = "stop what listens there" + (", or leave --network out" if block else "")
    raise UserError(f"{refusal}; {remedy}")


def find_used(prefix: str, ports: Iterable[int]) -> tuple[str, int] | None:
    """The first (address, port) of the block's low addresses that somebody listens on."""
    for port in ports:
        for host in _PROBED_HOSTS:
            test = _listen(f"{prefix}.{host}", port)
            if test is None:
                return f"{prefix}.{host}", port
            test.close()
    return None


def _find_ray_port(prefix: str) -> int:
    """A port for Ray's head, which listens on every address of the machine: by the block, so that runs differ."""
    _, second, third = (int(part) for part in prefix.split("."))
    start = (second * 256 + third) % len(_RAY_PORTS)
    for offset in range(len(_RAY_PORTS)):
        port = _RAY_PORTS[(start + offset) % len(_RAY_PORTS)]
        if test := _listen("0.0.0.0", port):
            test.close()
            return port
    return contract.PORT_RAY


def _prefix_of(block: str) -> str:
    try:
        network = ipaddress.ip_network(f"{block.removesuffix('/24')}/24")
    except ValueError as error:
        raise UserError(f"--network must be like 127.40.1.0, got {block}: {error}") from None
    if not network.is_loopback:
        raise UserError(f"--network must be a loopback block like 127.40.1.0, got {block}")
    return str(network.network_address).rpartition(".")[0]


def _candidates(seed: str) -> Iterable[str]:
    start = zlib.crc32(seed.encode())
    for i in range(_CANDIDATE_BLOCKS):
        number = (start + i * 7919) % (len(_SECOND_BYTES) * 256)
        yield f"127.{_SECOND_BYTES[number // 256]}.{number % 256}"


def _listen(address: str, port: int) -> socket.socket | None:
    """A listening socket, or None where somebody else listens. Old connections in TIME_WAIT do not count."""
    test = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    test.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        test.bind((address, port))
        test.listen(1)
    except OSError:
        test.close()
        return None
    return test


def _describe_listener(port: int) -> str:
    """' (process NAME, pid N)' where /proc tells."""
    inodes = set()
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if int(fields[1].split(":")[1], 16) == port and fields[3] == "0A":
                inodes.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or not inodes:
            continue
        with contextlib.suppress(OSError):
            if any(str(fd.readlink()) in inodes for fd in (process / "fd").iterdir()):
                return f" by {(process / 'comm').read_text().strip()} (pid {process.name})"
    return ""
