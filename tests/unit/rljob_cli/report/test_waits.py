"""Waits between roles, and the phases of a run."""

from hypothesis import given
from hypothesis import strategies as st

from rljob_cli.report.waits import ROLES, build_phase_times, build_role_times

PHASES = st.dictionaries(st.sampled_from(["generate", "score", "update", "publish", "sync", "new"]), st.floats(0, 1e6))


def test_each_role_works_in_its_phases_and_waits_in_the_others():
    phases = {"generate": 4.0, "score": 3.0, "update": 2.0, "publish": 0.5, "sync": 0.25}
    times = {time.role: time for time in build_role_times([{"phase_seconds": phases, "step_seconds": 10.0}] * 2)}
    assert list(times) == list(ROLES)
    assert times["rollouts"].works_seconds == 8.5
    assert times["rollouts"].waits_seconds == {"rewards": 6.0, "trainer": 5.0, "head": 0.5}
    assert times["trainer"].waits_seconds == {"rollouts": 8.5, "rewards": 6.0, "head": 0.5}
    assert times["head"].works_seconds == 0.5


@given(st.lists(PHASES, max_size=5))
def test_seconds_of_each_role_add_up_to_the_steps(phases):
    steps = [{"phase_seconds": each, "step_seconds": sum(each.values()) + 1} for each in phases]
    total = sum(step["step_seconds"] for step in steps)
    for time in build_role_times(steps):
        assert abs(time.works_seconds + sum(time.waits_seconds.values()) - total) <= 1e-6 * total


def test_run_without_steps_has_no_waits():
    assert build_role_times([]) == []
    assert build_phase_times({"wall_seconds": None, "phase_seconds": {}}) == []


def test_phases_and_the_rest_add_up_to_the_wall_time():
    found = build_phase_times({"wall_seconds": 10.0, "phase_seconds": {"update": 3.0, "generate": 5.0, "sync": 0.0}})
    assert [(phase.name, phase.seconds) for phase in found] == [("generate", 5.0), ("update", 3.0), ("other", 2.0)]
    assert sum(phase.share for phase in found) == 1.0
    [phase] = build_phase_times({"wall_seconds": None, "phase_seconds": {"update": 3.0}})
    assert (phase.name, phase.share) == ("update", 1.0), "an unknown wall time has no rest"
