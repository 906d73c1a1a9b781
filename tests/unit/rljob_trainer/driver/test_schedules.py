"""Each schedule type: its bound, the order in which groups train, and whether requests span a weight update."""

import pytest

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


def train(schedule, order, groups_per_step, limit):
    """Run one step in which groups are scored in this order. Return the groups in order of training."""
    dispatcher = Dispatcher(groups_per_step, schedule.max_staleness)
    while dispatcher.can_start():
        dispatcher.start()
    trained, after_each = [], []
    for index in order:
        dispatcher.record_scored(index)
        while taken := schedule.take(dispatcher, limit):
            trained += [ticket.index for ticket in taken]
        after_each.append(len(trained))
    return trained, after_each


def test_synchronous_trains_in_order_of_dispatch_once_all_are_scored():
    trained, after_each = train(build(type="synchronous"), [3, 1, 0, 2], 4, limit=2)
    assert trained == [0, 1, 2, 3]
    assert after_each == [0, 0, 0, 4]


def test_on_policy_trains_each_group_once_it_is_scored():
    trained, after_each = train(build(), [3, 1, 0, 2], 4, limit=2)
    assert trained == [3, 1, 0, 2]
    assert after_each == [1, 2, 3, 4]


def test_on_policy_is_synchronous_if_groups_are_scored_in_order_of_dispatch():
    assert train(build(), range(4), 4, limit=2)[0] == train(build(type="synchronous"), range(4), 4, limit=2)[0]
