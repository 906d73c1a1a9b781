"""Blocks of loopback addresses: never shared, and stable for an identity; the hosts file: the addresses of a name."""

from __future__ import annotations

import os
import socket

import pytest

from rljob_api.errors import UserError
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
    assert again.ray_port == first.ray_port


def test_identity_keeps_its_address():
    network = claim_block(SEED)
    one, two = network.address("one"), network.address("two")
    assert one != two
    assert network.address("one") == one
    network.close()


def test_more_pods_than_addresses_are_an_error():
    network = claim_block(SEED)
    with pytest.raises(UserError, match=r"all 253 addresses of .* are in use; use fewer replicas"):
        [network.address(str(number)) for number in range(254)]
    network.close()


def test_port_in_use_is_reported_with_its_process():
    prefix = unused_block(1)
    with socket.socket() as busy:
        busy.bind((f"{prefix}.1", 8100))
        busy.listen(1)
        with pytest.raises(UserError, match=rf"port 8100 on {prefix}\.1 is in use by .*pid {os.getpid()}"):
            claim_block("x", f"{prefix}.0")


def test_port_in_use_on_all_addresses_is_reported():
    with socket.socket() as busy:
        busy.bind(("0.0.0.0", 0))
        busy.listen(1)
        port = busy.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} "):
            claim_block("x", f"{unused_block(2)}.0", ports=[port])


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
