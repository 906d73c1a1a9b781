"""Simulated jobs whose times can be computed by hand."""

import dataclasses
import math

import pytest
from schedule_simulation.roles import Lengths, Shape, Uniform
from schedule_simulation.simulation import NearDispatcher, Simulation, step_seconds
from schedule_simulation.tail_rounds import TailRounds

from rljob_api.manifest.schedule import Schedule
from rljob_trainer.driver.schedules import build_schedule

SHAPE = Shape(
    groups_per_step=4,
    group_size=1,
    mini_batches=2,
    lengths=Lengths(median=100, sigma=0.0, longest=1000),
    reward_seconds=Uniform(2.0, 2.0),
    slots=100,
    sequences=100,
    sequence_speed=10.0,
    half_speed_at=math.inf,
    train_tokens_per_second=100.0,
    publish_seconds=1.0,
)
"""A step generates for 10 s, scores for 2 s, trains for 4 s and publishes for 1 s."""


def simulate(shape=SHAPE, num_steps=20, **schedule):
    return Simulation(shape, build_schedule(Schedule.model_validate(schedule))).run(num_steps)


def seconds(**arguments):
    return step_seconds(simulate(**arguments), skip=8)


def test_synchronous_adds_up_all_roles():
    assert seconds(type="synchronous") == pytest.approx(10 + 2 + 4 + 1)


def test_bounded_steps_share_the_time_of_an_episode():
    assert seconds(type="bounded", maxStaleness=1) == pytest.approx((10 + 2 + 4 + 1 + 1) / 2), "and two pauses"
    assert seconds(type="bounded", maxStaleness=4) == pytest.approx(4 + 1), "the trainer always works"


def test_one_step_off_waits_for_requests_before_the_update():
    assert seconds(type="oneStepOff") == pytest.approx(10 + 1), "rewards and training overlap with generation"


def test_on_policy_trains_while_long_answers_are_sampled():
    uneven = dataclasses.replace(SHAPE, lengths=Lengths(median=100, sigma=0.5, longest=1000))
    assert seconds(shape=uneven) < seconds(shape=uneven, type="synchronous") - 1


def test_shared_gpus_take_turns():
    shared = dataclasses.replace(SHAPE, shares_gpus=True)
    assert seconds(shape=shared, type="bounded", maxStaleness=4) == pytest.approx(10 + 4 + 1)


@pytest.mark.parametrize("max_staleness", [1, 2, 4])
def test_staleness_is_at_most_the_bound(max_staleness):
    uneven = dataclasses.replace(SHAPE, lengths=Lengths(median=100, sigma=1.5, longest=10_000))
    steps = simulate(shape=uneven, type="bounded", maxStaleness=max_staleness).steps
    assert max(value for step in steps for value in step.staleness) == max_staleness


def test_fewer_steps_ahead_give_younger_data():
    schedule = build_schedule(Schedule.model_validate({"type": "bounded", "maxStaleness": 4}))
    far, near = (Simulation(SHAPE, schedule, ahead).run(20) for ahead in (None, 3))
    assert step_seconds(far, 8) == step_seconds(near, 8) == pytest.approx(4 + 1)
    assert {value for step in far.steps[8:] for value in step.staleness} == {4}
    assert {value for step in near.steps[8:] for value in step.staleness} == {3}


def test_with_fewer_steps_ahead_no_group_is_due_when_it_could_train():
    dispatcher = NearDispatcher(groups_per_step=2, max_staleness=3, steps_ahead=1)

    def run_step(*scored):
        while dispatcher.can_start():
            dispatcher.start()
        for index in scored:
            dispatcher.record_scored(index)
        taken = [ticket.index for ticket in dispatcher.take(2)]
        return taken if len(taken) < 2 else (dispatcher.finish_step(), taken)[1]

    assert [run_step(1, 2), run_step(4, 5)] == [[1, 2], [4, 5]], "0 and 3 are slow, and due in step 3"
    assert dispatcher.waits_for() == []
    run_step(6, 7)
    assert run_step(8, 9) == []
    assert [ticket.index for ticket in dispatcher.waits_for()] == [0, 3]


def test_each_schedule_trains_the_same_groups():
    uneven = dataclasses.replace(SHAPE, lengths=Lengths(median=100, sigma=1.0, longest=10_000))
    on_policy, synchronous = (simulate(shape=uneven, type=name) for name in ("onPolicy", "synchronous"))
    assert [sorted(step.tokens) for step in on_policy.steps] == [sorted(step.tokens) for step in synchronous.steps]


def test_tail_rounds_lose_what_the_aborted_groups_had():
    rounds = TailRounds(dataclasses.replace(SHAPE, sequences=5), overcommit=1.5)
    rounds.run(1)
    assert rounds.aborted == [4, 5]
    assert rounds.lost_tokens == pytest.approx(100 + 20), "group 4 was not scored, and group 5 ran for 2 s of rewards"


def test_tail_rounds_train_every_group_once():
    uneven = dataclasses.replace(SHAPE, lengths=Lengths(median=100, sigma=1.0, longest=10_000))
    rounds = TailRounds(uneven, overcommit=1.5)
    ends = rounds.run(20)
    assert len(rounds.trained) == len(set(rounds.trained)) == 20 * SHAPE.groups_per_step
    assert set(rounds.trained) | set(rounds.aborted) == set(range(rounds.next_group))
    assert ends == sorted(ends)
