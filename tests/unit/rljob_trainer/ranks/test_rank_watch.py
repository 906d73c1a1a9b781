"""Which rank is to blame, by what each says about itself."""

import pytest

from rljob_api.manifest.job_sections import HangDetection
from rljob_trainer.liveness.judge import Beat, Judge, Pace
from rljob_trainer.ranks.rank_watch import RankWatch, find_behind, hung_error

MIN_SECONDS, MAX_SECONDS = 60, 7200


class Group:
    """Three ranks, and the seconds that the watch sees."""

    def __init__(self, pace=None):
        """`pace`: of the groups before."""
        pace = pace or Pace(HangDetection(min_seconds=MIN_SECONDS, max_seconds=MAX_SECONDS))
        self.watch, self.now, self.silent = RankWatch(Judge(pace, 0.0)), 0.0, set()
        self.collectives = [0, 0, 0]

    def pass_seconds(self, seconds, *, is_paused=False):
        """Return what hangs after each second, first to last."""
        found = None
        for _ in range(seconds):
            self.now += 1
            self.watch.judge.tick(self.now, is_paused=is_paused)
            for rank in range(3):
                self.watch.record_asked(rank)
                if rank not in self.silent:
                    self.watch.record_beat(rank, Beat(self.collectives[rank], "micro-batch 2 of 8"))
            found = found or self.watch.find_hung()
        return found

    def begin(self, method):
        """Begin a call that does not end."""
        self.unended = self.watch.calling(method)
        self.unended.__enter__()

    def call(self, method, seconds, error=None):
        with self.watch.calling(method):
            assert self.pass_seconds(seconds) is None
            if error:
                raise error


@pytest.fixture
def group():
    group = Group()
    for _ in range(3):
        group.call("accumulate", 10)
        group.call("apply", 2)
    return group


def test_a_stopped_rank_is_found_after_the_floor_although_the_call_may_take_longer(group):
    group.begin("accumulate")
    group.silent = {1}
    assert group.pass_seconds(MIN_SECONDS) is None
    hung = group.pass_seconds(1)
    assert (hung.ranks, hung.silent, hung.hang.kind) == ([1], {1}, "silence in accumulate")
    assert hung.hang.seconds < group.watch.judge.pace.limit("accumulate") == 250
    assert hung.doing == "in accumulate, micro-batch 2 of 8, after 0 collectives"


def test_the_rank_that_entered_fewer_collectives_hangs_and_the_others_wait_for_it(group):
    group.begin("accumulate")
    group.collectives = [5, 5, 4]
    hung = group.pass_seconds(300)
    assert (hung.ranks, hung.silent, hung.hang.limit_seconds) == ([2], frozenset(), 250)


def test_a_silent_rank_hangs_and_not_those_that_are_equally_far(group):
    for _ in range(20):
        group.watch.judge.pace.record("silence in accumulate", 100)  # as if ranks often held the interpreter
    group.begin("accumulate")
    group.silent = {2}
    hung = group.pass_seconds(300)
    assert (hung.ranks, hung.silent, hung.hang.kind) == ([2], {2}, "accumulate")


def test_a_rank_that_has_returned_does_not_hang(group):
    group.begin("apply")
    group.pass_seconds(MIN_SECONDS)
    group.now += 1
    group.watch.judge.tick(group.now)
    assert group.watch.find_hung(returned={0, 1}).ranks == [2], "alone outside of any collective, such as in a write"


def test_a_call_of_twenty_times_the_usual_time_is_no_hang(group):
    group.call("accumulate", 200)


def test_a_first_call_may_be_silent_until_the_ceiling(group):
    group.begin("export")
    group.silent = {0, 1, 2}
    assert group.pass_seconds(MAX_SECONDS - 1) is None
    assert group.pass_seconds(10) is not None, "and no longer"


def test_ranks_that_once_held_the_interpreter_may_do_it_again(group):
    with group.watch.calling("export"):
        group.silent = {0, 1, 2}
        group.pass_seconds(100)
        group.silent = set()
        group.pass_seconds(1)
    group.begin("export")
    group.silent = {0, 1, 2}
    assert group.pass_seconds(200) is None


def test_a_pause_counts_for_nobody(group):
    group.begin("accumulate")
    group.silent = {1}
    assert group.pass_seconds(10 * MIN_SECONDS, is_paused=True) is None


def test_a_stopped_rank_is_found_while_no_call_runs(group):
    group.pass_seconds(10)
    group.call("apply", 2)
    group.silent = {0}
    assert group.pass_seconds(MIN_SECONDS + 1).doing == "waiting for a call, micro-batch 2 of 8, after 0 collectives"


def test_the_start_of_the_processes_is_no_measure_of_their_silence():
    group = Group()
    group.silent = {0, 1, 2}
    with group.watch.calling("describe"):
        group.pass_seconds(100)
        group.silent = set()
        group.pass_seconds(3)
    assert group.watch.judge.pace.limit("silence in describe") == MIN_SECONDS


def test_the_next_group_may_take_as_long_to_start_as_this_one_did():
    first = Group()
    first.silent = {0, 1, 2}
    with first.watch.calling("describe"):
        first.pass_seconds(10)
        first.silent = set()
        first.pass_seconds(3)
    second = Group(first.watch.judge.pace)
    second.silent = {0, 1, 2}
    second.begin("describe")
    assert second.pass_seconds(20 * 10) is None
    hung = second.pass_seconds(100)
    assert (hung.ranks, hung.hang.limit_seconds, hung.doing) == ([0, 1, 2], 25 * 10, "in describe")


def test_a_failed_call_teaches_nothing(group):
    with pytest.raises(OSError, match="full"):
        group.call("save", 5, OSError("full"))
    assert group.watch.judge.pace.limit("save") == group.watch.judge.pace.limit("silence in save") == MAX_SECONDS
    assert group.watch.judge.find_hang() is None


@pytest.mark.parametrize(("entered", "behind"), [({0: 3, 1: 2, 2: 2}, [1, 2]), ({0: 1, 1: 1}, [0, 1]), ({}, [])])
def test_all_ranks_are_named_if_nothing_tells_them_apart(entered, behind):
    assert find_behind({rank: Beat(number) for rank, number in entered.items()}) == behind


def test_the_error_names_the_ranks_the_time_and_the_limit(group):
    group.begin("accumulate")
    group.silent = {1}
    hung = group.pass_seconds(MIN_SECONDS + 1)
    error = hung_error(hung, f"{hung.doing}; its process does not answer (state T (stopped))")
    assert str(error) == (
        "rank 1 hangs in accumulate, micro-batch 2 of 8, after 0 collectives; its process does not answer "
        "(state T (stopped)): nothing for 61 s, and 60 s are allowed (spec.hangDetection)"
    )
    (part,) = error.hung
    assert (part.role, part.name, part.limit_seconds) == ("trainer", "rank 1", 60)
