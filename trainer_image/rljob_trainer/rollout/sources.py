"""Which part of a weight file a receiver requests next: from the publisher, or from a peer. Pure.

A peer is another replica that downloads the same file, or has it. Parts are requested from the publisher in random
order, so that receivers that begin together soon have different parts for each other. A peer that fails once (an error,
a wrong hash, too slow) is not used again for this file.
Invariants: each part is in flight at most once, so that no thread writes where another one has verified. Every part can
be requested from the publisher, whatever peers do.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

POLL_SECONDS = 0.25
"""Between two questions to a peer about what it has."""


@dataclass
class _Peer:
    offers: set[int] = field(default_factory=set)
    """Parts that it had when it was asked last."""
    due_at: float = 0.0
    """When to ask it again."""
    is_busy: bool = False


class Sources:
    def __init__(self, num_parts: int, peers: Sequence[str], rng: random.Random) -> None:
        self._rng = rng
        self._pending = dict.fromkeys(rng.sample(range(num_parts), num_parts))
        """In the order of requests; no values."""
        self._num_missing = num_parts
        self._peers = {peer: _Peer() for peer in peers}

    @property
    def is_complete(self) -> bool:
        return not self._num_missing

    def take(self) -> int | None:
        """Return a part to request from the publisher; None while all that are missing are in flight."""
        part = next(iter(self._pending), None)
        if part is not None:
            del self._pending[part]
        return part

    def take_from_peer(self) -> tuple[str, int] | None:
        """Return a peer, and a part that it has. None if no idle peer has a part that is needed."""
        for name, peer in self._idle():
            while peer.offers:
                part = peer.offers.pop()
                if part in self._pending:
                    del self._pending[part]
                    peer.is_busy = True
                    return name, part
        return None

    def take_poll(self, now: float) -> str | None:
        """Return a peer to ask what it has; None if there is nothing to ask now."""
        for name, peer in self._idle() if self._pending else ():
            if peer.due_at <= now:
                peer.is_busy, peer.due_at = True, now + POLL_SECONDS
                return name
        return None

    def record_offers(self, name: str, parts: Iterable[int]) -> None:
        if peer := self._peers.get(name):
            peer.is_busy, peer.offers = False, self._pending.keys() & parts

    def record_received(self, name: str | None = None) -> None:
        """A part was received and verified. `name`: the peer; None for the publisher."""
        self._num_missing -= 1
        if name is not None and (peer := self._peers.get(name)):
            peer.is_busy = False

    def record_peer_failed(self, name: str, part: int | None) -> None:
        """`part`: what was requested, to be requested from others; None if the peer was asked what it has."""
        self._peers.pop(name, None)
        if part is not None:
            self._pending[part] = None

    def _idle(self) -> list[tuple[str, _Peer]]:
        idle = [(name, peer) for name, peer in self._peers.items() if not peer.is_busy]
        self._rng.shuffle(idle)
        return idle
