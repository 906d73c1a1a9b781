"""The dispatcher: who starts, who trains, and in which step, whatever is slow, replaced or lost."""

import copy
import heapq
import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

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


def test_admission_is_bounded_by_staleness():
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


def test_a_snapshot_is_in_order_of_dispatch():
    dispatcher = Dispatcher(groups_per_step=2, max_staleness=0)
    start_all(dispatcher)
    score(dispatcher, 1)
    dispatcher.take(1)
    assert indices(dispatcher.snapshot().tickets) == [0, 1]


# ---- whatever is slow, replaced or lost ----


def meets_deadlines(tickets, num_taken, dispatcher, groups_per_step, max_staleness):
    """Whether these groups train in time if no group is slow from now on: the n-th of them gets the n-th free slot."""
    deadlines = sorted(ticket.version + max_staleness for ticket in tickets)
    return all(
        dispatcher.finished_steps + (num_taken + number) // groups_per_step <= deadline
        for number, deadline in enumerate(deadlines)
    )


class Model:
    """What a job with this dispatcher has done, recorded independently."""

    def __init__(self):
        self.started = {}
        self.scored = set()
        self.replaced = {}
        """Index -> step."""
        self.taken = []
        self.trained = []
        """[steps][groups] Tickets."""

    def waiting(self):
        done = {ticket.index for step in [*self.trained, self.taken] for ticket in step} | self.replaced.keys()
        return [ticket for index, ticket in sorted(self.started.items()) if index not in done]


class DispatcherMachine(RuleBasedStateMachine):
    """Groups start, are scored in any order, replaced and taken; the driver crashes and resumes from any snapshot."""

    @initialize(
        groups_per_step=st.integers(1, 4),
        max_staleness=st.integers(0, 4),
        replacements=st.integers(0, 2),
    )
    def begin(self, groups_per_step, max_staleness, replacements):
        self.groups_per_step, self.max_staleness, self.max_replacements = groups_per_step, max_staleness, replacements
        self.model, self.dispatcher = Model(), self.build(None)
        self.checkpoint = (self.dispatcher.snapshot(), Model())

    def build(self, state):
        return Dispatcher(
            self.groups_per_step,
            self.max_staleness,
            state,
            max_replacements=self.max_replacements,
        )

    def feasible(self, without=None):
        """Whether all waiting groups can train in time, after this one if given."""
        tickets = [ticket for ticket in self.model.waiting() if ticket != without]
        num_taken = len(self.model.taken) + (without is not None)
        return meets_deadlines(tickets, num_taken, self.dispatcher, self.groups_per_step, self.max_staleness)

    @rule(limit=st.integers(1, 6))
    def start(self, limit):
        for _ in range(limit):
            if self.dispatcher.can_start():
                ticket = self.dispatcher.start()
                assert ticket.index == len(self.model.started)
                self.model.started[ticket.index] = ticket

    @rule(data=st.data())
    def score(self, data):
        open_ = [ticket.index for ticket in self.model.waiting() if ticket.index not in self.model.scored]
        for index in data.draw(st.lists(st.sampled_from(open_), unique=True)) if open_ else []:
            self.dispatcher.record_scored(index)
            self.model.scored.add(index)

    @rule(data=st.data())
    def replace(self, data):
        if self.dispatcher.can_replace() and self.model.waiting():
            index = data.draw(st.sampled_from(self.model.waiting())).index
            self.dispatcher.replace(index)
            self.model.replaced[index] = len(self.model.trained)

    @rule(limit=st.integers(1, 5))
    def take(self, limit):
        """Groups are taken oldest first, and a scored group is left only if an older one would miss its deadline."""
        taken = self.dispatcher.take(limit)
        assert len(taken) <= limit
        for ticket in taken:
            ready = [ticket for ticket in self.model.waiting() if ticket.index in self.model.scored]
            assert ticket == ready[0], "the oldest"
            self.model.taken.append(ticket)
            assert self.feasible(), "an older group can no longer train in time"
        ready = [ticket for ticket in self.model.waiting() if ticket.index in self.model.scored]
        if ready and len(taken) < limit and len(self.model.taken) < self.groups_per_step:
            assert not self.feasible(without=ready[0]), "the step waits although no group needs the slot"
            waits_for = self.dispatcher.waits_for()
            assert waits_for, "the groups that block it are reported"
            assert all(each.version < ready[0].version for each in waits_for)
            assert self.max_staleness > 1 or all(self.staleness(each) == self.max_staleness for each in waits_for)

    def staleness(self, ticket):
        return len(self.model.trained) - ticket.version

    @rule()
    def finish(self):
        if not self.dispatcher.num_left:
            self.dispatcher.finish_step()
            self.model.trained.append(self.model.taken)
            self.model.taken = []

    @rule()
    def save(self):
        """Take a checkpoint, in the middle of a step, too."""
        text = self.dispatcher.snapshot().model_dump_json()
        saved = copy.deepcopy(self.model)
        saved.taken, saved.scored = [], set()
        self.checkpoint = (DispatchState.model_validate_json(text), saved)

    @rule()
    def crash(self):
        state, model = self.checkpoint
        self.model = copy.deepcopy(model)
        self.dispatcher = self.build(state)
        assert list(self.dispatcher.tickets_to_restart) == self.model.waiting(), "each with its old version"

    @invariant()
    def admission_lets_all_waiting_groups_train_in_time(self):
        if hasattr(self, "model"):
            assert self.feasible()
            assert len(self.model.taken) + self.dispatcher.num_left == self.groups_per_step
            num_scored = sum(ticket.index in self.model.scored for ticket in self.model.waiting())
            assert self.dispatcher.num_scored == num_scored
            assert self.dispatcher.num_in_flight == len(self.model.waiting()) - num_scored
            num_admitted = len(self.model.started) - len(self.model.replaced)
            assert self.dispatcher.num_admitted == num_admitted
            limit = (len(self.model.trained) + self.max_staleness + 1) * self.groups_per_step
            assert num_admitted <= limit
            assert self.dispatcher.can_start() == (num_admitted < limit)
            num_replaced = list(self.model.replaced.values()).count(len(self.model.trained))
            assert self.dispatcher.can_replace() == (num_replaced < self.max_replacements)

    @invariant()
    def every_group_trains_once_and_in_time(self):
        if hasattr(self, "model"):
            trained = [(ticket, step) for step, tickets in enumerate(self.model.trained) for ticket in tickets]
            assert all(len(tickets) == self.groups_per_step for tickets in self.model.trained)
            assert len({ticket.index for ticket, _ in trained}) == len(trained), "once"
            assert not {ticket.index for ticket, _ in trained} & self.model.replaced.keys()
            assert all(0 <= step - ticket.version <= self.max_staleness for ticket, step in trained)

    @invariant()
    def steps_train_all_that_was_dispatched_max_staleness_before(self):
        if hasattr(self, "model") and self.model.trained:
            last, trained = len(self.model.trained) - 1, set(itertools.chain(*self.model.trained))
            kept = [ticket for ticket in self.model.started.values() if ticket.index not in self.model.replaced]
            assert {ticket for ticket in kept if ticket.version <= last - self.max_staleness} <= trained
            assert trained <= {ticket for ticket in kept if ticket.version <= last}

    def teardown(self):
        """No deadlock: if all groups in flight are scored, the step can be finished, and in time every group trains."""
        if not hasattr(self, "model"):
            return
        before = self.model.waiting()
        for _ in range(self.max_staleness + 1):
            self.start(self.groups_per_step * (self.max_staleness + 1))
            for ticket in self.model.waiting():
                self.dispatcher.record_scored(ticket.index)
                self.model.scored.add(ticket.index)
            self.take(self.groups_per_step)
            assert self.dispatcher.num_left == 0, "the step waits for no group"
            self.finish()
        self.every_group_trains_once_and_in_time()
        assert set(before) <= set(itertools.chain(*self.model.trained))


TestDispatcherMachine = DispatcherMachine.TestCase


# ---- what is trained is what was dispatched ----


def run_job(lengths, groups_per_step, max_staleness, room, num_steps):
    """Run a job in which a group takes its length to be scored, and `room` groups are in flight at most.

    Return the lengths dispatched at each version and the lengths trained in each step.
    """
    dispatcher = Dispatcher(groups_per_step, max_staleness)
    dispatched, trained, in_flight, now = [[] for _ in range(num_steps + 1)], [], [], 0.0
    while dispatcher.finished_steps < num_steps:
        while dispatcher.can_start() and len(in_flight) < room:
            ticket = dispatcher.start()
            dispatched[ticket.version].append(lengths[ticket.index])
            heapq.heappush(in_flight, (now + lengths[ticket.index], ticket.index))
        if len(trained) == dispatcher.finished_steps:
            trained.append([])
        trained[-1] += [lengths[ticket.index] for ticket in dispatcher.take(groups_per_step)]
        if dispatcher.num_left == 0:
            dispatcher.finish_step()
            continue
        now, index = heapq.heappop(in_flight)
        dispatcher.record_scored(index)
    return dispatched, trained


def contains(many, few):
    return not Counter(few) - Counter(many)


@given(
    groups_per_step=st.integers(1, 6),
    max_staleness=st.integers(0, 4),
    room=st.integers(1, 40),
    num_steps=st.integers(1, 12),
    data=st.data(),
)
def test_long_answers_are_trained_as_often_as_they_are_dispatched(
    groups_per_step, max_staleness, room, num_steps, data
):
    num_groups = (num_steps + max_staleness + 1) * groups_per_step
    lengths = data.draw(st.lists(st.sampled_from([1, 2, 3, 500]), min_size=num_groups, max_size=num_groups))
    dispatched, trained = run_job(lengths, groups_per_step, max_staleness, room, num_steps)
    for version in range(num_steps - max_staleness):
        window = trained[version : version + max_staleness + 1]
        assert contains(itertools.chain(*window), dispatched[version]), "all within max_staleness + 1 steps"
    for step in range(num_steps):
        total = list(itertools.chain(*trained[: step + 1]))
        assert contains(total, itertools.chain(*dispatched[: max(0, step + 1 - max_staleness)]))
        assert contains(itertools.chain(*dispatched[: step + 1]), total)
