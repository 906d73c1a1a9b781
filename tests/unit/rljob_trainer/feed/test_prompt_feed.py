"""The order of prompts over all sources: exact after a crash, none lost, none drawn twice in an epoch."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rljob_api.manifest.job_sections import Curriculum
from rljob_inputs.data.prompts import PromptSet
from rljob_inputs.prompts import Prompt
from rljob_trainer.episodes.types import Group
from rljob_trainer.feed.prompt_feed import FeedState, PromptFeed, PromptSource, choose_source
from tests.support.episodes import episode

LIMITS = Curriculum(easy_epochs=5, hard_epochs=2)


def source_of(name, num_rows, weight=1.0, left_out=()):
    rows = {row: Prompt(row, f"{name}{row}", [1]) for row in range(num_rows) if row not in left_out}
    return PromptSource(name, weight, PromptSet(num_rows, rows))


def group_of(number, key, *scores):
    episodes = [episode(index=(key.row, number, i), score=score) for i, score in enumerate(scores)]
    return Group(number, Prompt(key.row, "p", [1]), episodes)


SCORES = {1: (1.0, 1.0), 0: (0.0, 1.0), -1: (0.0, 0.0)}
sources = st.lists(st.tuples(st.integers(1, 6), st.sampled_from([0.5, 1.0, 2.0, 3.0])), min_size=1, max_size=3).map(
    lambda found: [source_of(f"s{i}", rows, weight) for i, (rows, weight) in enumerate(found)]
)


@given(sources, st.integers(0, 2**32), st.booleans(), st.integers(1, 60))
def test_without_a_curriculum_each_source_has_whole_epochs(sources, seed, shuffle, count):
    feed = PromptFeed(sources, FeedState(), seed=seed, shuffle=shuffle)
    drawn = [feed.draw() for _ in range(count)]
    for source in sources:
        rows, size = [key.row for key in drawn if key.source == source.name], source.prompts.num_rows
        for start in range(0, len(rows) - size + 1, size):
            assert sorted(rows[start : start + size]) == list(range(size))
    assert feed.num_skipped == 0


def test_one_source_has_the_order_of_a_job_without_others():
    alone = PromptFeed([source_of("train", 9)], FeedState(), seed=5, shuffle=True)
    mixed = PromptFeed([source_of("train", 9), source_of("other", 4)], FeedState(), seed=5, shuffle=True)
    first = [mixed.draw() for _ in range(24)]
    assert [key for key in first if key.source == "train"] == [alone.draw() for _ in range(12)]


def test_results_count_at_the_end_of_the_step_in_the_order_of_the_groups():
    feed = PromptFeed([source_of("train", 1)], FeedState(), LIMITS, seed=0, shuffle=False)
    key = feed.draw()
    feed.record(key, group_of(2, key, 0.0, 0.0))
    feed.record(key, group_of(1, key, 0.0, 1.0))
    assert feed.snapshot().sources["train"].streaks == ""
    feed.finish_step()
    in_turn = PromptFeed([source_of("train", 1)], FeedState(), LIMITS, seed=0, shuffle=False)
    in_turn.draw()
    for number, scores in ((1, (0.0, 1.0)), (2, (0.0, 0.0))):
        in_turn.record(key, group_of(number, key, *scores))
        in_turn.finish_step()
    assert feed.snapshot() == in_turn.snapshot()


def test_a_prompt_that_always_succeeds_is_drawn_in_one_of_as_many_epochs_as_allowed():
    feed = PromptFeed([source_of("train", 8)], FeedState(), LIMITS, seed=0, shuffle=True)
    drawn = []
    for number in range(200):
        key = feed.draw()
        drawn.append(key.row)
        feed.record(key, group_of(number, key, *(SCORES[1] if key.row < 4 else SCORES[0])))
        feed.finish_step()
    counts = Counter(drawn)
    easy, mixed = sum(counts[row] for row in range(4)), sum(counts[row] for row in range(4, 8))
    assert 0.2 < easy / mixed < 0.35, counts
    assert feed.num_skipped > 100


class Job:
    """Draws prompts for two steps at once, and finishes steps. What a group does depends on its number and its prompt
    alone. Each fifth group is replaced as soon as it starts, so its result waits for the end of the step."""

    def __init__(self, sources, curriculum, seed, saved=None):
        state, self.in_flight, self.drawn = saved or (FeedState().model_dump_json(), {}, [])
        self.in_flight, self.drawn = dict(self.in_flight), list(self.drawn)
        self.feed = PromptFeed(sources, FeedState.model_validate_json(state), curriculum, seed=seed, shuffle=True)

    def save(self):
        return self.feed.snapshot().model_dump_json(), dict(self.in_flight), list(self.drawn)

    def can_draw(self):
        return len(self.in_flight) < 2 * GROUPS_PER_STEP

    def draw(self):
        key, number = self.feed.draw(), len(self.drawn)
        cursor = self.feed.snapshot().sources[key.source].cursor
        self.drawn.append((key, cursor.epoch if cursor.position else cursor.epoch - 1))
        if number % 5 == 4:
            self._record(number, key)
        else:
            self.in_flight[number] = key

    def finish_step(self, arrange=list):
        oldest = sorted(self.in_flight)[:GROUPS_PER_STEP]
        for number in arrange(oldest):
            self._record(number, self.in_flight.pop(number))
        self.feed.finish_step()

    def _record(self, number, key):
        result = 1 if key.row % 3 == 0 else -1 if key.row % 3 == 1 else number % 3 - 1
        self.feed.record(key, group_of(number, key, *SCORES[result]))


GROUPS_PER_STEP = 3


class Resumed(RuleBasedStateMachine):
    """A job that is saved and crashes at any time, against one that does not."""

    @initialize(found=sources, seed=st.integers(0, 2**32), curriculum=st.sampled_from([None, LIMITS, LIMITS]))
    def begin(self, found, seed, curriculum):
        self.make = lambda saved=None: Job(found, curriculum, seed, saved)
        self.sizes = {source.name: source.prompts.num_rows for source in found}
        self.limit = 1 if curriculum is None else 4
        self.job, self.undisturbed = self.make(), self.make()
        self.saved = self.job.save()

    @precondition(lambda self: self.job.can_draw())
    @rule()
    def draw(self):
        self.job.draw()

    @precondition(lambda self: not self.job.can_draw())
    @rule(data=st.data())
    def finish_step(self, data):
        self.job.finish_step(lambda numbers: data.draw(st.permutations(numbers)))

    @rule()
    def save(self):
        self.saved = self.job.save()

    @rule()
    def crash(self):
        self.job = self.make(self.saved)

    @rule(steps=st.integers(1, 6))
    def run(self, steps):
        for _ in range(steps):
            while self.job.can_draw():
                self.job.draw()
            self.job.finish_step()

    @invariant()
    def order_is_that_of_the_undisturbed_job(self):
        while len(self.undisturbed.drawn) < len(self.job.drawn):
            if not self.undisturbed.can_draw():
                self.undisturbed.finish_step()
            self.undisturbed.draw()
        assert self.job.drawn == self.undisturbed.drawn[: len(self.job.drawn)]

    @invariant()
    def no_prompt_is_drawn_twice_in_an_epoch_or_lost(self):
        drawn = Counter((*key, epoch) for key, epoch in self.job.drawn)
        assert not drawn or max(drawn.values()) == 1
        for name, size in self.sizes.items():
            last = max((epoch for key, epoch in self.job.drawn if key.source == name), default=0)
            for first in range(last - self.limit + 1):
                seen = {row for source, row, epoch in drawn if source == name and first <= epoch < first + self.limit}
                assert seen == set(range(size)), f"{name} was not seen whole from epoch {first}"


TestResumed = Resumed.TestCase


@given(
    weights=st.lists(st.floats(0.01, 100) | st.integers(1, 20), min_size=1, max_size=8),
    count=st.integers(1, 300),
)
def test_no_source_is_a_prompt_ahead_of_its_share_or_far_behind(weights, count):
    drawn = [0] * len(weights)
    for number in range(1, count + 1):
        drawn[choose_source(weights, drawn)] += 1
        shares = [number * weight / sum(weights) for weight in weights]
        assert all(a - share < 1 + 1e-9 for a, share in zip(drawn, shares, strict=True)), (drawn, shares)
        assert all(share - a < max(1, len(weights) - 1) for a, share in zip(drawn, shares, strict=True))


def test_whole_weights_give_whole_rounds():
    drawn, order = [0, 0, 0], []
    for _ in range(12):
        order.append(choose_source([3, 2, 1], drawn))
        drawn[order[-1]] += 1
    assert order[:6] == order[6:]
    assert drawn == [6, 4, 2]
