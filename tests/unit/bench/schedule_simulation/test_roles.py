"""The clocks of simulated rollouts and reward slots."""

import dataclasses
import math

import pytest
from schedule_simulation.roles import Lengths, RewardSlots, Rollouts, Shape, Uniform

SHAPE = Shape(
    groups_per_step=2,
    group_size=1,
    mini_batches=1,
    lengths=Lengths(median=100, sigma=1.0, longest=1000),
    reward_seconds=Uniform(1.0, 1.0),
    slots=1,
    sequences=2,
    sequence_speed=10.0,
    half_speed_at=math.inf,
    train_tokens_per_second=100.0,
)


def drain(role):
    ends = []
    while (now := role.next_end()) < math.inf:
        ends.append((round(now, 6), role.pop(now)))
    return ends


def test_sequences_beyond_the_limit_queue():
    rollouts = Rollouts(SHAPE)
    for sample, tokens in enumerate((100, 50, 30)):
        rollouts.submit(0.0, sample, tokens)
    assert drain(rollouts) == [(5.0, 1), (8.0, 2), (10.0, 0)]


def test_sequences_share_the_speed():
    rollouts = Rollouts(dataclasses.replace(SHAPE, half_speed_at=1.0))
    rollouts.submit(0.0, 0, 100)
    rollouts.submit(0.0, 1, 10)
    assert drain(rollouts) == [(3.0, 1), (21.0, 0)], "10 / (1 + 2) tokens/s together, then 10 / (1 + 1) alone"


def test_remaining_tokens_are_those_of_running_sequences():
    rollouts = Rollouts(SHAPE)
    for sample in range(3):
        rollouts.submit(0.0, sample, 100)
    assert rollouts.remaining(4.0) == {0: 60.0, 1: 60.0}


def test_a_pause_delays_all_sequences():
    rollouts = Rollouts(SHAPE)
    rollouts.submit(0.0, 0, 100)
    rollouts.pause(4.0, 3.0)
    assert drain(rollouts) == [(13.0, 0)]


def test_requests_beyond_the_slots_queue():
    rewards = RewardSlots(1)
    rewards.submit(0.0, 0, 5.0)
    rewards.submit(1.0, 1, 2.0)
    assert drain(rewards) == [(5.0, 0), (7.0, 1)]


def test_long_answers_are_cut_off():
    class Draw:
        def lognormvariate(self, mu, sigma):
            return math.exp(mu + 5 * sigma)

    assert SHAPE.lengths.draw(Draw()) == pytest.approx(1000)
