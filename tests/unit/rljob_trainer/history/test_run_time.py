"""The time of a run: all of it is counted once, whatever dies."""

import math

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rljob_trainer.history.run_time import RunTime, read_run_time, write_run_time

SECONDS = st.floats(0, 1e5, allow_nan=False)
PHASES = st.dictionaries(st.sampled_from(["starting", "generate", "update", "evaluate", "checkpoint"]), SECONDS)
BEGIN = 1e9


class Run(RuleBasedStateMachine):
    """Drivers that start, work, lose time and die, against a wall clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.saved = BEGIN, 0.0
        self.time = RunTime(until=BEGIN)

    @rule(phases=PHASES, has_begun=st.booleans())
    def close(self, phases, has_begun):
        self.now += sum(phases.values())
        self.time.close(phases, None if has_begun else "start")

    @rule(cause=st.sampled_from(["hung", "outage"]), seconds=SECONDS)
    def add(self, cause, seconds):
        self.time.add(cause, seconds)

    @rule()
    def save(self):
        self.saved = self.time.trained

    @rule(gap=SECONDS, started=SECONDS, ended=st.booleans())
    def restart(self, gap, started, ended):
        lost, self.now = dict(self.time.lost), self.now + gap
        self.time.has_ended = ended
        trained = self.time.trained
        self.time.resume(self.now, started, self.saved)
        assert self.time.trained == self.saved
        waited = max(0.0, gap - started)
        repeated = trained - self.saved + (0.0 if ended else waited)
        assert math.isclose(self.time.lost.get("restart", 0.0) - lost.get("restart", 0.0), repeated, abs_tol=1e-3)
        queued = waited if ended else 0.0
        assert math.isclose(self.time.lost.get("queue", 0.0) - lost.get("queue", 0.0), queued, abs_tol=1e-3)

    @invariant()
    def trained_and_lost_are_the_wall_time(self):
        total = self.time.trained + sum(self.time.lost.values())
        assert math.isclose(total, self.now - BEGIN, rel_tol=1e-9, abs_tol=1e-3)
        assert math.isclose(self.time.until, self.now, abs_tol=1e-3)

    @invariant()
    def nothing_is_negative(self):
        assert min([self.time.trained, *self.time.lost.values()]) >= 0
        assert self.time.share is None or 0 <= self.time.share <= 1


TestRun = Run.TestCase


def test_time_before_the_first_step_is_of_the_start_and_the_rest_by_its_phase():
    time = RunTime(until=BEGIN)
    time.close({"starting": 5.0, "sync": 1.0, "evaluate": 2.0}, "start")
    time.close({"generate": 6.0, "update": 3.0, "checkpoint": 1.0}, None)
    assert (time.trained, time.lost) == (9.0, {"start": 6.0, "evaluation": 2.0, "checkpoint": 1.0})
    assert time.share == 0.5


def test_what_was_lost_for_another_reason_is_taken_from_training_first():
    time = RunTime(until=BEGIN)
    time.add("hung", 7.0)
    time.close({"generate": 6.0, "checkpoint": 3.0}, None)
    assert (time.trained, time.lost) == (0.0, {"hung": 7.0, "checkpoint": 2.0})
    time.close({"generate": 1.0}, None)
    assert time.trained == 1.0, "it counts once"


def test_a_clock_that_is_set_back_costs_no_time():
    time = RunTime(until=BEGIN)
    time.resume(BEGIN - 100, 5.0, 0.0)
    assert (time.lost, time.until) == ({}, BEGIN)


def test_time_in_a_queue_is_not_in_the_share():
    time = RunTime(until=BEGIN)
    time.close({"update": 3.0, "checkpoint": 1.0}, None)
    time.has_ended = True
    time.resume(BEGIN + 1004, 0.0, 3.0)
    assert (time.lost["queue"], time.share) == (1000.0, 0.75)


@pytest.mark.parametrize("content", [None, "", '{"trained": 1'])
def test_a_run_without_a_readable_file_begins(tmp_path, content):
    if content is not None:
        (tmp_path / "time.json").write_text(content)
    assert read_run_time(tmp_path) is None


def test_the_next_driver_reads_what_the_last_one_wrote(tmp_path):
    time = RunTime(trained=1.0, lost={"start": 2.0}, until=BEGIN, has_ended=True)
    write_run_time(tmp_path, time)
    assert read_run_time(tmp_path) == time
