"""Whatever peers do, a receiver gets every part once; and no part is in flight twice."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.rollout.download import POLL_SECONDS, Sources

PEERS = ("a", "b", "c")


def _new(num_parts: int, peers: tuple[str, ...] = PEERS) -> Sources:
    return Sources(num_parts, peers, random.Random(0))


@given(st.integers(1, 12), st.data())
def test_every_part_is_received_once_whatever_peers_do(num_parts: int, data: st.DataObject) -> None:
    sources, now = _new(num_parts), 0.0
    received: list[int] = []
    at_publisher: list[int] = []
    at_peers: dict[str, int | None] = {}
    for action in data.draw(st.lists(st.sampled_from(["publisher", "peer", "poll", "answer", "fail", "arrive"]))):
        now += POLL_SECONDS / 2
        if action == "publisher" and (part := sources.take()) is not None:
            at_publisher.append(part)
        elif action == "peer" and (work := sources.take_from_peer()) is not None:
            assert work[0] not in at_peers, "a peer gets one request at a time"
            at_peers[work[0]] = work[1]
        elif action == "poll" and (name := sources.take_poll(now)) is not None:
            assert name not in at_peers
            at_peers[name] = None
        elif action == "arrive" and at_publisher:
            received.append(at_publisher.pop(0))
            sources.record_received()
        elif action in ("answer", "fail") and at_peers:
            name = data.draw(st.sampled_from(sorted(at_peers)))
            part = at_peers.pop(name)
            if action == "fail":
                sources.record_peer_failed(name, part)
            elif part is None:
                sources.record_offers(name, data.draw(st.sets(st.integers(0, num_parts + 2))))
            else:
                received.append(part)
                sources.record_received(name)
        in_flight = at_publisher + [part for part in at_peers.values() if part is not None]
        assert len({*received, *in_flight}) == len(received) + len(in_flight), "two threads write the same part"
        assert sources.is_complete == (len(received) == num_parts)
    for name, part in at_peers.items():  # the peers that are left are killed
        sources.record_peer_failed(name, part)
    for _ in at_publisher:
        sources.record_received()
    rest = iter(sources.take, None)
    received += at_publisher + [part for part in rest if sources.record_received() is None]
    assert sorted(received) == list(range(num_parts))
    assert sources.is_complete


def test_peer_is_asked_for_what_it_has_alone() -> None:
    sources = _new(4, ("a",))
    assert sources.take_from_peer() is None, "nothing is known about it"
    assert sources.take_poll(0.0) == "a"
    assert sources.take_poll(9.0) is None, "it has not answered yet"
    sources.record_offers("a", [2])
    assert sources.take_from_peer() == ("a", 2)
    sources.record_received("a")
    assert sources.take_from_peer() is None
    assert sources.take_poll(0.1) is None, "it was asked just now"
    assert sources.take_poll(POLL_SECONDS) == "a"


def test_peer_that_failed_is_not_used_again() -> None:
    sources = _new(2, ("a",))
    sources.take_poll(0.0)
    sources.record_offers("a", [0, 1])
    work = sources.take_from_peer()
    assert work is not None
    sources.record_peer_failed(*work)
    sources.record_offers("a", [0, 1])  # an answer that was under way
    assert sources.take_from_peer() is None
    assert sources.take_poll(99.0) is None
    assert {sources.take(), sources.take()} == {0, 1}, "the publisher has every part"


def test_receivers_begin_with_different_parts() -> None:
    firsts = {Sources(1000, PEERS, random.Random(seed)).take() for seed in range(8)}
    assert len(firsts) == 8, "the publisher would send the same parts to all, and none could help another one"
