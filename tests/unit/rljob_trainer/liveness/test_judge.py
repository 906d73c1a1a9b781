"""Work is declared hung after its limit, and never for time in which the watcher did not look or that was a pause."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rljob_api.manifest.job_sections import HangDetection
from rljob_trainer.liveness.judge import MAX_TICK_SECONDS, Pace, Work

MAX_SECONDS = 200


def build_work(min_seconds=10, now=0.0):
    return Work(Pace(HangDetection(min_seconds=min_seconds, max_seconds=MAX_SECONDS)), now)


class WorkMachine(RuleBasedStateMachine):
    """One piece of work at a time, whose watcher ticks, pauses and is stopped itself."""

    @initialize()
    def begin(self):
        self.work, self.now, self.watched = build_work(), 0.0, 0.0
        self.piece = None

    @precondition(lambda self: self.piece is None)
    @rule(kind=st.sampled_from(["update", "save"]))
    def begin_piece(self, kind):
        self.piece, self.watched = self.work.begin(kind), 0.0

    @precondition(lambda self: self.piece is not None)
    @rule(ends=st.booleans())
    def end_piece(self, ends):
        (self.work.finish if ends else self.work.drop)(self.piece)
        self.piece = None

    @rule(gap=st.floats(min_value=0, max_value=MAX_TICK_SECONDS), count=st.integers(min_value=1, max_value=60))
    def watch(self, gap, count):
        for _ in range(count):
            self.now += gap
            self.work.tick(self.now)
            self.watched += gap

    @rule(gap=st.floats(min_value=0, max_value=1e6))
    def pause(self, gap):
        self.now += gap
        self.work.tick(self.now, is_paused=True)

    @rule(gap=st.floats(min_value=0, max_value=1e6))
    def sleep(self, gap):
        self.now += gap
        self.work.tick(self.now)
        self.watched += min(gap, MAX_TICK_SECONDS)

    @invariant()
    def judges_by_the_watched_time_alone(self):
        hang = self.work.find_hang()
        if self.piece is None:
            assert hang is None
            return
        limit = self.work.pace.limit(self.piece.kind)
        if hang is None:
            assert self.watched <= limit + 1e-6 <= MAX_SECONDS + 1e-6, "always declared after the ceiling"
        else:
            assert (hang.kind, hang.limit_seconds) == (self.piece.kind, limit)
            assert hang.seconds == pytest.approx(self.watched)
            assert self.watched > limit - 1e-6


TestWork = WorkMachine.TestCase


def test_the_piece_that_is_most_over_its_limit_is_named():
    work = build_work()
    for kind, seconds in (("short", 0.1), ("long", 5.0)):
        work.pace.record(kind, seconds)
    work.begin("long"), work.begin("short")
    for second in range(1, 21):
        work.tick(float(second))
    assert work.find_hang().kind == "short"


def test_a_piece_that_fails_teaches_nothing():
    work = build_work()
    with pytest.raises(ValueError, match="x"), work.running("update"):
        raise ValueError("x")
    assert work.pace.limit("update") == MAX_SECONDS
    with work.running("update"):
        work.tick(1.0)
    assert work.pace.limit("update") == 25
    assert work.find_hang() is None
