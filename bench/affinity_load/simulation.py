"""Episodes of several turns on replicas with prefix caches: which tokens of their prompts must be computed.

A discrete-event simulation around the product's `Fleet`. A cache holds blocks and drops the one that was used longest
ago; blocks of older weights are of no use. A turn's time grows with the tokens that it computes, and with the number
of requests on the same replica.
"""

import heapq
import itertools
import random
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from rljob_trainer.replicas.fleet import Affinity, Fleet

Policy = Literal["affinity", "least loaded", "round robin"]
POLICIES: tuple[Policy, ...] = ("affinity", "least loaded", "round robin")


@dataclass(frozen=True)
class Load:
    replicas: int = 2
    groups: int = 16
    group_size: int = 8
    turns: int = 6
    prompt_tokens: int = 1000
    answer_tokens: int = 300
    """In the mean."""
    answer_spread: float = 0.8
    """Standard deviation of its logarithm."""
    observation_tokens: int = 500
    cache_tokens: float = float("inf")
    """Size of the cache of one replica."""
    block: int = 16
    """Tokens of a block of the cache."""
    update_seconds: float = float("inf")
    """Between two updates of the weights, which take no time."""
    pause_seconds: tuple[float, float] = (0.1, 1.5)
    """Between two turns of an episode."""
    prefill_tokens_per_second: float = 20_000
    decode_tokens_per_second: float = 100
    batch: int = 64
    """Requests beside which a token takes twice as long."""


@dataclass
class Counts:
    """What happened, of one policy."""

    prompt_tokens: int = 0
    computed_tokens: int = 0
    picked: dict[str, int] = field(default_factory=dict)
    """Turns by outcome; empty without affinity."""
    longest_seconds: float = 0.0
    """Integral of the longest queue."""
    mean_seconds: float = 0.0
    """Integral of the mean queue."""
    seconds: float = 0.0

    def summarize(self) -> dict[str, float]:
        """Return shares of tokens and turns, and the mean of the longest queue over the mean of all queues."""
        turns = sum(self.picked.values())
        return {
            "computed_share": self.computed_tokens / self.prompt_tokens,
            "hit_share_of_tokens": 1 - self.computed_tokens / self.prompt_tokens,
            **{name: self.picked.get(name, 0) / turns for name in ("hit", "spilled", "new") if turns},
            "longest_over_mean": self.longest_seconds / self.mean_seconds,
            "seconds": self.seconds,
        }


class PrefixCache:
    """Blocks of one replica."""

    def __init__(self, num_blocks: float) -> None:
        self._num_blocks, self._blocks = num_blocks, OrderedDict[Hashable, None]()

    def use(self, blocks: list[Hashable]) -> int:
        """Return how many of a prompt's first blocks are there. Then all of them are, the first ones as the newest:
        vLLM drops the end of a prompt before its beginning."""
        known = 0
        for block in blocks:
            if block not in self._blocks:
                break
            known += 1
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._num_blocks:
            self._blocks.popitem(last=False)
        return known


class Simulation:
    def __init__(self, load: Load, policy: Policy, seed: int = 0) -> None:
        self._load, self._policy, self._draw = load, policy, random.Random(seed)
        self._now = 0.0
        self._fleet = Fleet()
        self._names = [f"replica-{number}" for number in range(load.replicas)]
        self._fleet.observe_addresses(self._names)
        self._caches = {name: PrefixCache(load.cache_tokens // load.block) for name in self._names}
        self._rounds = itertools.cycle(self._names)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.counts = Counts()

    def run(self) -> Counts:
        """Play all episodes, which start at once."""
        load = self._load
        for group in range(load.groups):
            prefix = Affinity()
            for sample in range(load.group_size):
                self._begin(self._play((group, sample), Affinity(prefix)))
        while self._events:
            then, _, run = heapq.heappop(self._events)
            self._advance(then)
            run()
        self.counts.seconds, self.counts.picked = self._now, dict(self._fleet.num_picked)
        return self.counts

    def _begin(self, episode: Iterator[float]) -> None:
        """Continue an episode after each number of seconds that it yields."""
        seconds = next(episode, None)
        if seconds is not None:
            event = (self._now + seconds, next(self._numbers), lambda: self._begin(episode))
            heapq.heappush(self._events, event)

    def _advance(self, then: float) -> None:
        queues = [replica.in_flight for replica in self._fleet.replicas.values()]
        self.counts.longest_seconds += max(queues) * (then - self._now)
        self.counts.mean_seconds += sum(queues) / len(queues) * (then - self._now)
        self._now = then

    def _play(self, episode: tuple[int, int], affinity: Affinity) -> Iterator[float]:
        load, draw = self._load, self._draw
        length = load.prompt_tokens
        for _ in range(load.turns):
            address = self._pick(affinity)
            salt = int(self._now // load.update_seconds) if load.update_seconds < float("inf") else 0
            num_common = load.prompt_tokens // load.block
            blocks: list[Hashable] = [
                (salt, episode[0] if number < num_common else episode, number) for number in range(length // load.block)
            ]
            computed = length - self._caches[address].use(blocks) * load.block
            self.counts.prompt_tokens += length
            self.counts.computed_tokens += computed
            spread = load.answer_spread
            answer = max(1, round(load.answer_tokens * draw.lognormvariate(-(spread**2) / 2, spread)))
            slower = 1 + self._fleet.replicas[address].in_flight / load.batch
            prefill = computed / load.prefill_tokens_per_second
            yield (prefill + answer / load.decode_tokens_per_second) * slower
            self._fleet.record_done(address)
            yield draw.uniform(*load.pause_seconds)
            length += answer + load.observation_tokens

    def _pick(self, affinity: Affinity) -> str:
        if self._policy == "round robin":
            address = next(self._rounds)
            self._fleet.replicas[address].in_flight += 1
        else:
            address = self._fleet.pick(self._now, affinity=affinity if self._policy == "affinity" else None) or ""
        assert address
        return address
