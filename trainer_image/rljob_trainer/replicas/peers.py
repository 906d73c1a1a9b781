"""Which replicas may give each other parts of the weights: those that poll the head and serve their download. Pure."""

import random

NUM_PEERS = 8
"""For each replica: random ones, so that parts reach all replicas in a few hops."""
_MAX_AGE_SECONDS = 90.0
"""A replica polls at least every 30 s."""


class Peers:
    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self._polled_at: dict[str, float] = {}
        """By address."""

    def record(self, address: str, now: float) -> None:
        self._polled_at = {a: at for a, at in self._polled_at.items() if now - at < _MAX_AGE_SECONDS} | {address: now}

    def choose(self, address: str, now: float) -> list[str]:
        """Return peers for the replica with this address."""
        others = [a for a, at in self._polled_at.items() if a != address and now - at < _MAX_AGE_SECONDS]
        return self._rng.sample(others, min(NUM_PEERS, len(others)))
