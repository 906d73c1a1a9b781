"""The dispatcher: who starts, who trains, and in which step, whatever is slow, replaced or lost."""

import pytest

from rljob_trainer.driver.dispatcher import Dispatcher, DispatchState, Ticket


def start_all(dispatcher):
    started = []
    while dispatcher.can_start():
        started.append(dispatcher.start())
    return started


def score(dispatcher, *indices):
    for index in indices:
        dispatcher.record_scored(index)


def indices(tickets):
    return [ticket.index for ticket in tickets]


def run_step(dispatcher, *scored):
    """Score these groups, which fill the step, and finish it. Start all that may start in the next one."""
    score(dispatcher, *scored)
    taken = indices(dispatcher.take(len(scored)))
    dispatcher.finish_step()
    start_all(dispatcher)
    return taken


# ---- examples ----


def test_admission_is_bounded_by_steps_ahead():
    dispatcher = Dispatcher(groups_per_step=2, max_staleness=1)
    assert indices(start_all(dispatcher)) == [0, 1, 2, 3]
    assert run_step(dispatcher, 0, 1) == [0, 1]
    assert dispatcher.num_in_flight == 4, "two of version 0 and two of version 1"
    with pytest.raises(ValueError, match="can_start"):
        dispatcher.start()


def test_on_policy_groups_train_in_order_of_completion():
    dispatcher = Dispatcher(groups_per_step=3, max_staleness=0)
    start_all(dispatcher)
    score(dispatcher, 2)
    assert indices(dispatcher.take(9)) == [2]
    score(dispatcher, 1, 0)
    assert indices(dispatcher.take(1)) == [0], "the oldest first, and no more than the limit"
    assert not dispatcher.can_start(), "a group of this version would train in the next step"
    assert indices(dispatcher.take(9)) == [1]
    dispatcher.finish_step()
    assert dispatcher.start() == Ticket(3, version=1)


def test_a_step_takes_exactly_its_groups():
    dispatcher = Dispatcher(groups_per_step=2, max_staleness=1)
    score(dispatcher, *indices(start_all(dispatcher)))
    assert indices(dispatcher.take(9)) == [0, 1]
    assert (dispatcher.num_left, dispatcher.num_scored) == (0, 2)
    assert dispatcher.take(9) == dispatcher.waits_for() == []


def test_a_step_with_too_few_groups_is_not_finished():
    dispatcher = Dispatcher(groups_per_step=2, max_staleness=0)
    start_all(dispatcher)
    score(dispatcher, 0)
    dispatcher.take(2)
    with pytest.raises(ValueError, match="step 0 still needs 1 groups"):
        dispatcher.finish_step()


def test_a_younger_group_does_not_take_the_slot_of_a_due_one():
    dispatcher = Dispatcher(groups_per_step=2, max_staleness=1)
    start_all(dispatcher)
    assert run_step(dispatcher, 1, 3) == [1, 3]
    score(dispatcher, 4, 5)
    assert dispatcher.take(2) == [], "0 and 2 are due now"
    assert indices(dispatcher.waits_for()) == [0, 2]
    score(dispatcher, 2)
    assert indices(dispatcher.take(2)) == [2]
    assert indices(dispatcher.waits_for()) == [0]


def test_a_younger_group_overtakes_a_slow_one_that_has_time():
    dispatcher = Dispatcher(groups_per_step=2, max_staleness=2)
    for _ in range(3):
        dispatcher.start()  # as many as the rollouts have room for
    score(dispatcher, 0, 1)
    dispatcher.take(2)
    dispatcher.finish_step()
    for _ in range(2):
        dispatcher.start()
    score(dispatcher, 3, 4)
    assert dispatcher.waits_for() == []
    assert indices(dispatcher.take(2)) == [3, 4], "group 2 is slow, and due in step 2"


def test_steps_between_now_and_the_deadline_keep_their_slots():
    dispatcher = Dispatcher(groups_per_step=1, max_staleness=2)
    start_all(dispatcher)
    assert run_step(dispatcher, 0) == [0]
    score(dispatcher, 3)
    assert dispatcher.take(1) == [], "1 and 2 are due in step 2, which has one slot: one must train now"
    assert indices(dispatcher.waits_for()) == [1, 2]
    score(dispatcher, 2)
    assert indices(dispatcher.take(1)) == [2], "any"


def test_a_replaced_group_lets_another_start_within_the_bound():
    dispatcher = Dispatcher(groups_per_step=2, max_staleness=0, max_replacements=1)
    start_all(dispatcher)
    score(dispatcher, 0, 1)
    dispatcher.replace(0)
    assert dispatcher.num_admitted == 1
    assert start_all(dispatcher) == [Ticket(2, version=0)]
    with pytest.raises(ValueError, match="can_replace"):
        dispatcher.replace(1)
    score(dispatcher, 2)
    assert indices(dispatcher.take(2)) == [1, 2]
    dispatcher.finish_step()
    assert dispatcher.can_replace(), "the bound is per step"


def test_no_group_starts_that_only_a_step_after_the_last_could_train():
    dispatcher = Dispatcher(groups_per_step=2, max_staleness=2, total_steps=2)
    assert len(start_all(dispatcher)) == 4
    dispatcher.total_steps = 4
    assert len(start_all(dispatcher)) == 2, "6 in all, as max_staleness allows"


def test_a_snapshot_has_the_groups_of_the_unfinished_step():
    dispatcher = Dispatcher(groups_per_step=2, max_staleness=1, max_replacements=1)
    start_all(dispatcher)
    run_step(dispatcher, 1, 2)
    score(dispatcher, 0, 3)
    dispatcher.replace(4)
    assert indices(dispatcher.take(2)) == [0, 3]
    state = DispatchState.model_validate_json(dispatcher.snapshot().model_dump_json())
    assert (state.finished_steps, state.next_index, state.num_replaced) == (1, 6, 1)

    resumed = Dispatcher(2, 1, state, max_replacements=1)
    assert resumed.tickets_to_restart == (Ticket(0, 0), Ticket(3, 0), Ticket(5, 1))
    assert not resumed.can_replace()
    assert start_all(resumed) == [Ticket(6, 1)], "for the replaced group 4"
    score(resumed, 5)
    assert resumed.take(2) == [], "0 and 3 keep their deadlines"
    assert indices(resumed.waits_for()) == [0, 3]
