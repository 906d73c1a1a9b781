"""Blocks of loopback addresses: never shared, stable for an identity."""

from __future__ import annotations

import socket

import pytest

from rljob_api.errors import UserError
from rljob_cli.local.network import claim_block


def test_two_runs_never_get_one_block():
    first = claim_block("same seed")
    second = claim_block("same seed")
    assert first.prefix != second.prefix
    with pytest.raises(UserError, match="another `rljob run`"):
        claim_block("x", f"{first.prefix}.0")
    first.close()
    second.close()


def test_the_same_run_gets_the_same_block_again():
    first = claim_block("a run's folder")
    first.close()
    again = claim_block("a run's folder")
    again.close()
    assert again.prefix == first.prefix
    assert again.ray_port == first.ray_port


def test_an_identity_keeps_its_address():
    network = claim_block("addresses")
    one, two = network.address("one"), network.address("two")
    assert one != two
    assert network.address("one") == one
    network.close()


def test_a_port_in_use_is_named_with_who_uses_it():
    with socket.socket() as busy:
        busy.bind(("127.12.77.1", 8100))
        busy.listen(1)
        with pytest.raises(UserError, match=r"port 8100 on 127\.12\.77\.1 is in use by .*pid \d+"):
            claim_block("x", "127.12.77.0")


def test_a_port_that_is_taken_on_every_address_is_named():
    with socket.socket() as busy:
        busy.bind(("0.0.0.0", 0))
        busy.listen(1)
        port = busy.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} "):
            claim_block("x", ports=[port])


@pytest.mark.parametrize("block", ["10.0.0.0", "nonsense", "127.1"])
def test_a_block_that_is_no_loopback_block_is_refused(block):
    with pytest.raises(UserError, match=r"127\.40\.1\.0"):
        claim_block("x", block)
