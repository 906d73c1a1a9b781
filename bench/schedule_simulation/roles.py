"""What takes time in a simulated job: rollouts, reward slots, and the shape of a job. No schedule here.

A rollout decodes many sequences at once; the more it runs, the slower is each. A reward request takes a slot for its
latency. Owns clocks and queues of one role each; the simulation moves them.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class Uniform:
    low: float
    high: float

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2

    def draw(self, source: random.Random) -> float:
        return source.uniform(self.low, self.high)


@dataclass(frozen=True)
class Lengths:
    """Lognormal lengths in tokens; a longer answer is cut off at `longest`."""

    median: float
    sigma: float
    longest: float

    def draw(self, source: random.Random) -> float:
        return min(self.longest, self.median * source.lognormvariate(0, self.sigma))


@dataclass(frozen=True)
class Shape:
    """A job's sizes and speeds. Seconds and tokens."""

    groups_per_step: int
    group_size: int
    mini_batches: int
    lengths: Lengths
    reward_seconds: Uniform
    slots: int
    """Reward requests that execute at a time."""
    sequences: int
    """Sequences that the rollouts decode at a time."""
    sequence_speed: float
    """Tokens per second of a sequence that is alone."""
    half_speed_at: float
    """Sequences at which each decodes at half of that speed."""
    train_tokens_per_second: float
    publish_seconds: float = 0.0
    """From the end of a step to its served weights."""
    shares_gpus: bool = False
    """Whether rollouts and trainer take turns on the same GPUs: nothing trains while sequences are decoded."""

    @property
    def samples_per_step(self) -> int:
        return self.groups_per_step * self.group_size


class Rollouts:
    """Sequences that share the speed of the rollouts. The others queue in order of arrival."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._decoded, self._now = 0.0, 0.0
        """Tokens that a sequence in flight since the start would have, at the time `_now`."""
        self._running: list[tuple[float, int]] = []
        """(value of _decoded at its end, sample), a heap."""
        self._queue: deque[tuple[float, int]] = deque()
        self._paused_until = 0.0

    @property
    def num_running(self) -> int:
        return len(self._running)

    def submit(self, now: float, sample: int, tokens: float) -> None:
        self._advance(now)
        self._queue.append((tokens, sample))
        self._fill()

    def remaining(self, now: float) -> dict[int, float]:
        """Return the tokens that each running sequence still needs."""
        self._advance(now)
        return {sample: end - self._decoded for end, sample in self._running}

    def pause(self, now: float, seconds: float) -> None:
        self._advance(now)
        self._paused_until = now + seconds

    def next_end(self) -> float:
        """Return the time at which the next sequence ends; infinity if none runs."""
        if not self._running:
            return float("inf")
        return max(self._now, self._paused_until) + (self._running[0][0] - self._decoded) / self._speed()

    def pop(self, now: float) -> int:
        """Remove the sequence that ends now, and return its sample."""
        self._advance(now)
        _, sample = heapq.heappop(self._running)
        self._fill()
        return sample

    def _speed(self) -> float:
        return self._shape.sequence_speed / (1 + len(self._running) / self._shape.half_speed_at)

    def _advance(self, now: float) -> None:
        self._decoded += max(0.0, now - max(self._now, self._paused_until)) * self._speed()
        self._now = now

    def _fill(self) -> None:
        while self._queue and len(self._running) < self._shape.sequences:
            tokens, sample = self._queue.popleft()
            heapq.heappush(self._running, (self._decoded + tokens, sample))


class RewardSlots:
    """Executions in slots; the others queue in order of arrival."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._running: list[tuple[float, int]] = []
        self._queue: deque[tuple[float, int]] = deque()

    @property
    def num_running(self) -> int:
        return len(self._running)

    def submit(self, now: float, sample: int, seconds: float) -> None:
        self._queue.append((seconds, sample))
        self._fill(now)

    def next_end(self) -> float:
        return self._running[0][0] if self._running else float("inf")

    def pop(self, now: float) -> int:
        _, sample = heapq.heappop(self._running)
        self._fill(now)
        return sample

    def _fill(self, now: float) -> None:
        while self._queue and len(self._running) < self._slots:
            seconds, sample = self._queue.popleft()
            heapq.heappush(self._running, (now + seconds, sample))
