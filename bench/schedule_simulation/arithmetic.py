"""The published 7B figures from arithmetic: N samples per step, C reward slots, GPU phases one after another.

Source: verl pull request 2854: a 7B model on 8 GPUs, 1,024 prompts x 5 samples per step, a reward of U(1, 40) s, and a
thread pool of 256. Times are seconds per step without evaluation.
"""

from __future__ import annotations

import random

from schedule_simulation.roles import RewardSlots, Uniform

SAMPLES, SLOTS, MINI_BATCHES = 5120, 256, 4
REWARD = Uniform(1.0, 40.0)
GENERATE, LOGPROB, UPDATE = 40.6, 83.5, 126.6
FLOOR = GENERATE + LOGPROB + UPDATE
PUBLISHED = {"baseline": 585.0, "one_step_off": 403.0, "best": 424.0, "floor": 251.0}


def scoring_seconds(samples: int, slots: int, seed: int = 0) -> float:
    """Return the time from the first request to the last score if all requests are sent at once."""
    draw, queue, now = random.Random(seed), RewardSlots(slots), 0.0
    for sample in range(samples):
        queue.submit(0.0, sample, REWARD.draw(draw))
    while queue.num_running:
        now = queue.next_end()
        queue.pop(now)
    return now


def synchronous(slots: int) -> float:
    """Rewards start after generation and overlap with the log-probs; all updates wait for the last score."""
    return GENERATE + max(LOGPROB, scoring_seconds(SAMPLES, slots)) + UPDATE


def on_policy(slots: int) -> float:
    """The k-th of M mini-batches starts when k / M of the samples are scored, in order of completion."""
    scored = scoring_seconds(SAMPLES, slots)
    ready = [GENERATE + max(LOGPROB, scored * (k + 1) / MINI_BATCHES) for k in range(MINI_BATCHES)]
    return max(begin + (MINI_BATCHES - k) * UPDATE / MINI_BATCHES for k, begin in enumerate(ready))


def one_step_off(slots: int) -> float:
    """Rewards have a whole step: only GPUs or slots limit it."""
    return max(FLOOR, SAMPLES * REWARD.mean / slots)
