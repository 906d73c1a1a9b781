"""Work is declared hung after its limit, and never for time in which the watcher did not look or that was a pause."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rljob_api.manifest.job_sections import HangDetection
from rljob_trainer.liveness.judge import MAX_TICK_SECONDS, Beat, Hang, Judge, Pace

MAX_SECONDS = 200


def build_judge(min_seconds=10, now=0.0):
    return Judge(Pace(HangDetection(min_seconds=min_seconds, max_seconds=MAX_SECONDS)), now)


class JudgeMachine(RuleBasedStateMachine):
    """One piece of work at a time, whose judge ticks, pauses and is stopped itself."""

    @initialize()
    def begin(self):
        self.judge, self.now, self.watched = build_judge(), 0.0, 0.0
        self.piece, self.num_done = None, 0

    @precondition(lambda self: self.piece is None)
    @rule(kind=st.sampled_from(["update", "save"]))
    def begin_piece(self, kind):
        self.piece, self.watched = kind, 0.0
        self.judge.hear("part", Beat(self.num_done, kind))

    @precondition(lambda self: self.piece is not None)
    @rule(ends=st.booleans())
    def end_piece(self, ends):
        self.num_done += ends
        self.judge.hear("part", Beat(self.num_done))
        self.piece = None

    @rule(gap=st.floats(min_value=0, max_value=MAX_TICK_SECONDS), count=st.integers(min_value=1, max_value=60))
    def watch(self, gap, count):
        for _ in range(count):
            self.now += gap
            self.judge.tick(self.now)
            self.watched += gap

    @rule(gap=st.floats(min_value=0, max_value=1e6))
    def pause(self, gap):
        self.now += gap
        self.judge.tick(self.now, is_paused=True)

    @rule(gap=st.floats(min_value=0, max_value=1e6))
    def sleep(self, gap):
        self.now += gap
        self.judge.tick(self.now)
        self.watched += min(gap, MAX_TICK_SECONDS)

    @invariant()
    def judges_by_the_watched_time_alone(self):
        hang = self.judge.find_hang()
        if self.piece is None:
            assert hang is None
            return
        limit = self.judge.pace.limit(self.piece)
        if hang is None:
            assert self.watched <= limit + 1e-6 <= MAX_SECONDS + 1e-6, "always declared after the ceiling"
        else:
            assert (hang.kind, hang.limit_seconds) == (self.piece, limit)
            assert hang.seconds == pytest.approx(self.watched)
            assert self.watched > limit - 1e-6


TestJudge = JudgeMachine.TestCase


def test_the_piece_that_is_most_over_its_limit_is_named():
    judge = build_judge()
    for kind, seconds in (("short", 0.1), ("long", 5.0)):
        judge.pace.record(kind, seconds)
    for kind in ("long", "short"):
        judge.hear(kind, Beat(0, kind))
    for second in range(1, 21):
        judge.tick(float(second))
    assert judge.find_hang().kind == "short"


def test_a_piece_that_fails_teaches_nothing():
    judge = build_judge()
    with pytest.raises(ValueError, match="x"), judge.running("update"):
        raise ValueError("x")
    assert judge.pace.limit("update") == MAX_SECONDS
    with judge.running("update"):
        judge.tick(1.0)
    assert judge.pace.limit("update") == 25
    assert judge.find_hang() is None


def test_a_part_begins_anew_once_it_has_finished_more_and_not_by_other_work():
    judge = build_judge()
    judge.hear("engine", Beat(3, "a step"))
    judge.tick(2.0)
    judge.hear("engine", Beat(3, "a load"))
    assert judge.seconds("engine") == 2, "the same question, which now waits for a load"
    judge.hear("engine", Beat(5, "a step"))
    assert judge.seconds("engine") == 0
    assert (judge.pace.limit("a load"), judge.pace.limit("a step")) == (50, MAX_SECONDS), "it has finished the load"


def test_what_is_no_longer_owed_teaches_nothing():
    judge = build_judge()
    judge.hear("engine", Beat(3, "tokens"))
    judge.tick(2.0)
    judge.hear("engine", Beat(3))
    judge.tick(4.0)
    judge.hear("engine", Beat(4))
    assert (judge.seconds("engine"), judge.pace.limit("tokens")) == (None, MAX_SECONDS)


def test_a_hang_says_how_long_it_took_and_what_is_allowed():
    hang = Hang("save", 61.2, 60.0)
    assert str(hang) == "61 s, and 60 s are allowed (spec.hangDetection)"
    part = hang.blame("trainer", "rank 1", "in save", "it is replaced")
    assert (part.role, part.name, part.seconds, part.limit_seconds) == ("trainer", "rank 1", 61.2, 60.0)
