"""Each schedule type: its bound, the order in which groups train, and whether requests span a weight update."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.manifest.schedule import Schedule
from rljob_trainer.driver.dispatcher import Dispatcher
from rljob_trainer.driver.schedules import build_schedule


def build(**fields):
    return build_schedule(Schedule.model_validate(fields))


@pytest.mark.parametrize(
    ("fields", "max_staleness", "spans_updates"),
    [
        ({}, 0, False),
        ({"type": "onPolicy"}, 0, False),
        ({"type": "synchronous"}, 0, False),
        ({"type": "oneStepOff"}, 1, False),
        ({"type": "bounded"}, 2, True),
        ({"type": "bounded", "maxStaleness": 1}, 1, True),
        ({"type": "bounded", "maxStaleness": 8}, 8, True),
    ],
)
def test_each_type_has_its_bound_and_its_weight_updates(fields, max_staleness, spans_updates):
    schedule = build(**fields)
    assert (schedule.max_staleness, schedule.spans_updates) == (max_staleness, spans_updates)


def train(schedule, completions, groups_per_step, limit):
    """Run steps in which groups are scored in the order of `completions` ([steps][groups] numbers within the step).

    Return the groups in order of training, and how many have trained after each score.
    """
    dispatcher, trained, after_each = Dispatcher(groups_per_step, schedule.max_staleness), [], []
    for completion in completions:
        started = []
        while dispatcher.can_start():
            started.append(dispatcher.start().index)
        for number in completion:
            dispatcher.record_scored(started[number])
            while taken := schedule.take(dispatcher, limit):
                trained += [ticket.index for ticket in taken]
            after_each.append(len(trained))
        dispatcher.finish_step()
    return trained, after_each


def test_synchronous_trains_in_order_of_dispatch_once_all_are_scored():
    trained, after_each = train(build(type="synchronous"), [[3, 1, 0, 2]], 4, limit=2)
    assert trained == [0, 1, 2, 3]
    assert after_each == [0, 0, 0, 4]


def test_on_policy_trains_each_group_once_it_is_scored():
    trained, after_each = train(build(), [[3, 1, 0, 2]], 4, limit=2)
    assert trained == [3, 1, 0, 2]
    assert after_each == [1, 2, 3, 4]


@given(data=st.data(), groups_per_step=st.integers(1, 6), num_steps=st.integers(1, 4), limit=st.integers(1, 6))
def test_synchronous_is_what_on_policy_trains_in_order_of_dispatch(data, groups_per_step, num_steps, limit):
    in_order = [list(range(groups_per_step))] * num_steps
    completions = [data.draw(st.permutations(order)) for order in in_order]
    reference, _ = train(build(type="synchronous"), completions, groups_per_step, limit)
    assert reference == list(range(groups_per_step * num_steps)), "in any order of completion"
    assert train(build(), in_order, groups_per_step, limit)[0] == reference
    on_policy, _ = train(build(), completions, groups_per_step, limit)
    for step in range(num_steps):
        of_step = slice(step * groups_per_step, (step + 1) * groups_per_step)
        assert sorted(on_policy[of_step]) == reference[of_step], "the same groups in each step"
