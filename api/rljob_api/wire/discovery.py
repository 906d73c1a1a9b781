"""Service discovery: the addresses of the ready Pods behind the DNS name of a headless Service.

If RLJOB_HOSTS_FILE is set (`rljob run`), that hosts(5) file replaces DNS. It may have several lines per name.

The ports at which a run's programs listen are those of contract.py, shifted by one number for all programs of a run.
On a cluster each Pod has its own network, and nothing is shifted. `rljob run` shifts them to ports that no program of
the machine uses. Invariant: programs listen and connect only through `listening_port`; manifests are never shifted.
"""

import os
import socket
from pathlib import Path

from rljob_api.wire.contract import ENV_HOSTS_FILE, ENV_PORT_OFFSET


def resolve(host: str) -> list[str]:
    """Return the sorted addresses of `host`; empty if no Pod is ready or DNS does not know the name."""
    hosts_file = os.environ.get(ENV_HOSTS_FILE)
    if hosts_file:
        return sorted(set(_lookup(Path(hosts_file), host)))
    try:
        infos = socket.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return []
    return sorted({str(info[4][0]) for info in infos})


def _lookup(hosts_file: Path, host: str) -> list[str]:
    if not hosts_file.exists():
        return []
    lines = (line.partition("#")[0].split() for line in hosts_file.read_text().splitlines())
    return [fields[0] for fields in lines if host in fields[1:]]


def listening_port(port: int) -> int:
    """Return where this run's programs listen instead of `port`, one of the ports in contract.py."""
    return port + int(os.environ.get(ENV_PORT_OFFSET) or 0)
