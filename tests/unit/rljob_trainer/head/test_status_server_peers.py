"""Which replicas the head names to a replica."""

from __future__ import annotations

import random

from rljob_trainer.head.status_server import NUM_PEERS, Peers


def test_replica_gets_some_of_the_others_that_poll() -> None:
    peers = Peers(random.Random(0))
    assert peers.choose("r0", 0.0) == []
    for i in range(20):
        peers.record(f"r{i}", 0.0)
    chosen = peers.choose("r0", 1.0)
    assert len(set(chosen)) == NUM_PEERS
    assert "r0" not in chosen


def test_replica_that_polls_no_longer_is_not_named() -> None:
    peers = Peers()
    peers.record("old", 0.0)
    peers.record("new", 80.0)
    assert peers.choose("me", 100.0) == ["new"]
