"""Busy shares of roles and the partition of the wall time into phases."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.driver.role_clock import ROLES, PhaseClock, RoleClock


def test_overlapping_work_of_a_role_counts_once():
    clock = RoleClock(100.0)
    clock.begin("rewards", 101.0)
    clock.begin("rewards", 102.0)
    clock.end("rewards", 103.0)
    clock.end("rewards", 105.0)
    clock.begin("trainer", 109.0)
    assert clock.shares(110.0) == {"rollouts": 0.0, "rewards": 0.4, "trainer": 0.1}


def test_only_roles_of_the_job_are_reported():
    clock = RoleClock(0.0, ["runner"])
    clock.begin("runners", 0.0)
    clock.begin("tools", 0.0)
    assert clock.shares(4.0) == {"rollouts": 0.0, "rewards": 0.0, "trainer": 0.0, "runners": 1.0}


def test_work_in_progress_continues_after_a_reset():
    clock = RoleClock(0.0)
    clock.begin("rollouts", 0.0)
    clock.reset(8.0)
    assert clock.shares(8.0) == dict.fromkeys(ROLES, 0.0), "no time has passed"
    assert clock.shares(10.0)["rollouts"] == 1.0
    clock.end("rollouts", 11.0)
    assert clock.busy_seconds(12.0)["rollouts"] == 3.0


@pytest.mark.parametrize(("clock", "name"), [(RoleClock(0.0), "trainer"), (PhaseClock(0.0), "update")])
def test_end_without_a_begin_is_refused(clock, name):
    with pytest.raises(ValueError, match=f"{name} ended more often"):
        clock.end(name, 1.0)


def test_failed_work_ends():
    times = itertools.count()
    roles, phases = RoleClock(next(times)), PhaseClock(next(times))
    with (
        pytest.raises(OSError, match="disk"),
        roles.within("trainer", lambda: next(times)),
        phases.within("sync", lambda: next(times)),
    ):
        raise OSError("disk")
    assert roles.busy_seconds(100.0)["trainer"] == 3.0
    with pytest.raises(ValueError, match="sync"):
        phases.end("sync", 100.0)


@given(st.lists(st.tuples(st.sampled_from(ROLES), st.floats(0, 9), st.floats(0, 9)), max_size=12))
def test_busy_time_is_the_union_of_the_intervals(work):
    clock = RoleClock(0.0)
    events = [(start, 0, "begin", role) for role, start, _ in work]
    events += [(start + length, 1, "end", role) for role, start, length in work]
    for at, _, what, role in sorted(events):
        getattr(clock, what)(role, at)
    marks = sorted({0.0, *(at for at, *_ in events), 20.0})
    for role in ROLES:
        mine = [(start, start + length) for name, start, length in work if name == role]
        covered = sum(b - a for a, b in itertools.pairwise(marks) if any(s <= a and b <= e for s, e in mine))
        assert clock.busy_seconds(20.0)[role] == pytest.approx(covered)
        assert clock.shares(20.0)[role] == pytest.approx(covered / 20.0)


def test_streaming_step_is_split_by_what_it_waits_for():
    clock = PhaseClock(0.0)
    clock.begin("score", 1.0)  # the step
    clock.begin("generate", 1.0)
    clock.begin("generate", 1.0)
    clock.end("generate", 4.0)
    clock.begin("update", 5.0)  # a first group, while the second completion is open
    clock.end("update", 7.0)
    clock.end("generate", 9.0)
    assert clock.phase == "score"
    clock.begin("update", 12.0)
    clock.end("update", 13.0)
    clock.begin("publish", 13.0)
    clock.end("publish", 14.0)
    clock.begin("sync", 14.0)
    clock.end("sync", 16.0)
    clock.end("score", 16.0)
    taken = clock.take(16.0)
    assert taken == {"starting": 1.0, "generate": 6.0, "update": 3.0, "score": 3.0, "publish": 1.0, "sync": 2.0}


def test_wait_for_an_evaluation_is_not_one_for_rewards():
    clock = PhaseClock(0.0)
    clock.begin("evaluate", 0.0)
    clock.begin("score", 0.0)
    clock.begin("generate", 0.0)
    clock.end("generate", 5.0)
    assert clock.phase == "evaluate"
    clock.end("score", 6.0)
    clock.end("evaluate", 7.0)
    assert clock.take(8.0) == {"generate": 5.0, "evaluate": 3.0}, "a gap belongs to the phase before it"


PHASES = st.sampled_from(["generate", "score", "update", "publish", "sync", "evaluate", "checkpoint"])


@given(st.lists(st.tuples(PHASES, st.booleans(), st.floats(0, 5)), max_size=30))
def test_phases_add_up_to_the_wall_time(facts):
    clock, now, active, taken = PhaseClock(3.0), 3.0, [], {}
    for phase, is_begin, seconds in facts:
        now += seconds
        if is_begin:
            clock.begin(phase, now)
            active.append(phase)
        elif active:
            clock.end(active.pop(), now)
        for name, value in clock.take(now).items() if seconds > 4 else ():
            taken[name] = taken.get(name, 0.0) + value
    total = sum(taken.values()) + sum(clock.take(now + 1.0).values())
    assert total == pytest.approx(now + 1.0 - 3.0)
