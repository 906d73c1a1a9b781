"""Tail rounds, for comparison: on-policy steps that start more groups than they train (RollPacker, arXiv 2509.21009).

A short round starts `overcommit` x groups_per_step groups, trains the first groups_per_step that are scored, and aborts
the others. Aborted groups wait for a long round, which starts when groups_per_step of them have gathered and runs them
to their ends. So each group trains once, with weights of its step; what was decoded before an abort is lost. RLJob has
no such schedule.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from schedule_simulation.roles import RewardSlots, Rollouts, Shape


@dataclass
class TailRounds:
    shape: Shape
    overcommit: float = 1.25
    seed: int = 0
    now: float = 0.0
    next_group: int = 0
    aborted: list[int] = field(default_factory=list)
    lost_tokens: float = 0.0
    trained: list[int] = field(default_factory=list)

    def run(self, num_steps: int) -> list[float]:
        """Return the time at which each step ended."""
        ends = []
        for _ in range(num_steps):
            size = self.shape.groups_per_step
            if len(self.aborted) >= size:
                groups, self.aborted = self.aborted[:size], self.aborted[size:]
            else:
                count = round(size * self.overcommit)
                groups = list(range(self.next_group, self.next_group + count))
                self.next_group += count
            self._run_round(groups)
            ends.append(self.now)
        return ends

    def draw(self, group: int) -> tuple[list[float], list[float]]:
        """Return lengths and reward latencies of a group, the same as in the other simulation."""
        draw = random.Random(f"{self.seed}/{group}")
        tokens = [self.shape.lengths.draw(draw) for _ in range(self.shape.group_size)]
        return tokens, [self.shape.reward_seconds.draw(draw) for _ in tokens]

    def _run_round(self, groups: list[int]) -> None:
        """Advance the clock until groups_per_step groups have trained, one after the other in order of completion."""
        shape, size = self.shape, self.shape.group_size
        rollouts, rewards = Rollouts(shape), RewardSlots(shape.slots)
        samples = {group: self.draw(group) for group in groups}
        missing, submitted_at = dict.fromkeys(groups, size), self.now
        for group in groups:
            for number, tokens in enumerate(samples[group][0]):
                rollouts.submit(submitted_at, group * size + number, tokens)
        trainer_free_at, num_trained, decoded, now = submitted_at, 0, set(), submitted_at
        while num_trained < shape.groups_per_step:
            if rewards.next_end() <= rollouts.next_end():
                now = rewards.next_end()
                group = rewards.pop(now) // size
                missing[group] -= 1
                if not missing[group]:
                    num_trained += 1
                    self.trained.append(group)
                    trainer_free_at = max(now, trainer_free_at) + sum(samples[group][0]) / shape.train_tokens_per_second
            else:
                now = rollouts.next_end()
                sample = rollouts.pop(now)
                decoded.add(sample)
                rewards.submit(now, sample, samples[sample // size][1][sample % size])
        running = rollouts.remaining(now)
        for group in (group for group in groups if missing[group]):
            for number, tokens in enumerate(samples[group][0]):
                sample = group * size + number
                self.lost_tokens += tokens if sample in decoded else tokens - running.get(sample, tokens)
            self.aborted.append(group)
        self.now = trainer_free_at + shape.publish_seconds
