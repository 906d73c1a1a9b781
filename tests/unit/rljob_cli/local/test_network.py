"""Blocks of loopback addresses: never shared, and stable for an identity; free ports; the hosts file."""

from __future__ import annotations

import contextlib
import os
import socket

import pytest

from rljob_api.errors import UserError
from rljob_api.wire.contract import PORT_RAY, PORT_ROLLOUT, PORT_RUN_FILES, PORT_SERVICE, PORTS
from rljob_cli.local import network
from rljob_cli.local.network import build_hosts, claim_block

SEED = f"process {os.getpid()}"


def unused_block(number):
    """A block that no run claims, and no other process of tests."""
    return f"127.{230 + number}.{os.getpid() % 256}"


def test_two_runs_never_get_the_same_block():
    first = claim_block(SEED)
    second = claim_block(SEED)
    assert first.prefix != second.prefix
    with pytest.raises(UserError, match="another `rljob run`"):
        claim_block("x", f"{first.prefix}.0")
    first.close()
    second.close()


def test_same_run_gets_the_same_block_again():
    first = claim_block(SEED)
    first.close()
    again = claim_block(SEED)
    again.close()
    assert again.prefix == first.prefix
    assert again.port(PORT_RAY) == first.port(PORT_RAY)


def test_identity_keeps_its_address():
    claimed = claim_block(SEED)
    one, two = claimed.address("one"), claimed.address("two")
    assert one != two
    assert claimed.address("one") == one
    claimed.close()


def test_more_pods_than_addresses_are_an_error():
    claimed = claim_block(SEED)
    with pytest.raises(UserError, match=r"all 253 addresses of .* are in use; use fewer replicas"):
        [claimed.address(str(number)) for number in range(254)]
    claimed.close()


def test_ports_of_other_programs_are_left_to_them(monkeypatch):
    """In a separate range, of ports 30000 to 32767: above those of runs, and below those of outgoing connections."""
    offset = 23_650 + 32 * (os.getpid() % 16)
    offsets = range(offset, offset + 32)
    monkeypatch.setattr(network, "_OFFSETS", offsets)
    block = f"{unused_block(1)}.0"
    with contextlib.ExitStack() as stack:
        found = []
        last_engine = PORT_ROLLOUT + 15  # of a trainer Pod with 16 GPUs
        for address, port in (("0.0.0.0", last_engine), ("127.0.0.1", PORT_SERVICE), ("127.9.9.9", PORT_RUN_FILES)):
            with contextlib.closing(claim_block("x", block)) as claimed:
                found.append(claimed.port(PORT_RAY) - PORT_RAY)
            stack.enter_context(socket.create_server((address, port + found[-1])))
        with contextlib.closing(claim_block("x", block)) as claimed:
            found.append(claimed.port(PORT_RAY) - PORT_RAY)
            assert claimed.environment == {"RLJOB_PORT_OFFSET": str(found[-1])}
    assert len(set(found)) == 4, "each listener moves all ports of the next run"
    assert set(found) <= set(offsets)


def test_machine_without_free_ports_is_an_error(monkeypatch):
    offset = 23_650 + os.getpid() % 512
    monkeypatch.setattr(network, "_OFFSETS", range(offset, offset + 1))
    with (
        socket.create_server(("127.0.0.1", PORT_SERVICE + offset)),
        pytest.raises(UserError, match="too many ports between 20000 and 30000 are in use: a run needs 23"),
    ):
        claim_block("x", f"{unused_block(2)}.0")


def test_shifted_ports_are_below_those_of_outgoing_connections():
    claimed = claim_block(SEED)
    claimed.close()
    assert all(20_000 <= claimed.port(port) < 30_000 for port in PORTS)
    assert claimed.port(9400) == 9400, "the port of a user's container"


@pytest.mark.parametrize("block", ["10.0.0.0", "nonsense", "127.1"])
def test_block_that_is_not_a_loopback_block_is_rejected(block):
    with pytest.raises(UserError, match=r"127\.40\.1\.0"):
        claim_block("x", block)


def pod(name, ip, ready=True, **metadata):
    conditions = [{"type": "Ready", "status": str(ready)}]
    status = {"phase": "Running", "podIP": ip, "conditions": conditions}
    return {"metadata": {"name": name, "labels": {"app": "a"}, **metadata}, "spec": {}, "status": status}


def service(**spec):
    return {"kind": "Service", "metadata": {"name": "s", "namespace": "ns"}, "spec": {"selector": {"app": "a"}, **spec}}


def addresses(name, *args):
    return [line.split()[0] for line in build_hosts(*args).splitlines() if name in line.split()[1:]]


def test_service_resolves_only_to_ready_pods():
    pods = [pod("p-0", "127.1.1.1"), pod("p-1", "127.1.1.2", ready=False)]
    for name in ("s", "s.ns", "s.ns.svc", "s.ns.svc.cluster.local"):
        assert addresses(name, [service()], pods) == ["127.1.1.1"]


def test_service_with_publish_not_ready_addresses_resolves_to_unready_pods():
    pods = [pod("p-0", "127.1.1.1"), pod("p-1", "127.1.1.2", ready=False)]
    assert addresses("s", [service(publishNotReadyAddresses=True)], pods) == ["127.1.1.1", "127.1.1.2"]


def test_terminating_pod_has_no_name():
    pods = [pod("p-0", "127.1.1.1", deletionTimestamp="now")]
    assert build_hosts([service(publishNotReadyAddresses=True)], pods) == ""


def test_pod_of_a_stateful_set_has_a_separate_name():
    assert addresses("p-0.s", [service()], [pod("p-0", "127.1.1.1"), pod("p-1", "127.1.1.2")]) == ["127.1.1.1"]
