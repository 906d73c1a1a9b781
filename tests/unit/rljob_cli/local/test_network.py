"""Blocks of loopback addresses: never shared, and stable for an identity."""

from __future__ import annotations

import os
import socket

import pytest

from rljob_api.errors import UserError
from rljob_cli.local.network import claim_block

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
