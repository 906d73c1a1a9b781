"""Waits between roles, and the phases of a run."""

from hypothesis import given
from hypothesis import strategies as st

from rljob_cli.report.sections import ROLES, build_lost_times, build_phase_times, build_role_times
from tests.support.records import run_summary, step_record

PHASES = st.dictionaries(
    st.sampled_from(["generate", "score", "update", "publish", "sleep", "wake", "sync", "new"]), st.floats(0, 1e6)
)


def test_each_role_works_in_its_phases_and_waits_in_the_others():
    phases = {"generate": 4.0, "score": 3.0, "update": 2.0, "publish": 0.5, "sync": 0.25}
    times = {time.role: time for time in build_role_times([step_record(phase_seconds=phases, step_seconds=10.0)] * 2)}
    assert list(times) == list(ROLES)
    assert times["rollouts"].works_seconds == 8.5
    assert times["rollouts"].waits_seconds == {"rewards": 6.0, "trainer": 5.0, "head": 0.5}
    assert times["trainer"].waits_seconds == {"rollouts": 8.5, "rewards": 6.0, "head": 0.5}
    assert times["head"].works_seconds == 0.5


def test_change_of_turns_is_work_for_the_role_that_gets_its_turn():
    phases = {"sleep": 1.0, "wake": 2.0}
    times = {time.role: time for time in build_role_times([step_record(phase_seconds=phases, step_seconds=3.0)])}
    assert (times["trainer"].works_seconds, times["rollouts"].works_seconds) == (1.0, 2.0)
    assert all(phase.meaning for phase in build_phase_times(run_summary(phase_seconds=phases)))


@given(st.lists(PHASES, max_size=5))
def test_seconds_of_each_role_add_up_to_the_steps(phases):
    steps = [step_record(phase_seconds=each, step_seconds=sum(each.values()) + 1) for each in phases]
    total = sum(step.step_seconds for step in steps)
    for time in build_role_times(steps):
        assert abs(time.works_seconds + sum(time.waits_seconds.values()) - total) <= 1e-6 * total


def test_run_without_steps_has_no_waits():
    assert build_role_times([]) == []
    assert build_phase_times(run_summary()) == []


def test_phases_and_the_rest_add_up_to_the_wall_time():
    phases = {"update": 3.0, "generate": 5.0, "sync": 0.0}
    found = build_phase_times(run_summary(wall_seconds=10.0, phase_seconds=phases))
    assert [(phase.name, phase.seconds) for phase in found] == [("generate", 5.0), ("update", 3.0), ("other", 2.0)]
    assert sum(phase.share for phase in found) == 1.0
    [phase] = build_phase_times(run_summary(phase_seconds={"update": 3.0}))
    assert (phase.name, phase.share) == ("update", 1.0), "an unknown wall time has no rest"


def test_start_of_pods_is_a_phase_of_the_time():
    """Scheduling, pulls of images and starts were in `other`, outside of all shares."""
    summary = run_summary(
        wall_seconds=100.0, phase_seconds={"update": 55.0}, training_share=0.75, lost_seconds={"start": 15.0}
    )
    found = {phase.name: (phase.seconds, phase.share) for phase in build_phase_times(summary)}
    assert found == {"update": (55.0, 0.55), "Pods": (40.0, 0.4), "other": (5.0, 0.05)}


def test_time_that_did_not_train_has_shares_of_the_time_without_the_queue():
    lost = {"start": 10.0, "restart": 15.0, "queue": 900.0, "hung": 0.0}
    found = build_lost_times(run_summary(training_share=0.75, lost_seconds=lost))
    assert [(each.name, each.seconds, each.share) for each in found] == [
        ("queue", 900.0, 0.0), ("restart", 15.0, 0.15), ("start", 10.0, 0.1),
    ]  # fmt: skip
    assert all(each.meaning for each in found)
    assert build_lost_times(run_summary()) == []
    assert [each.share for each in build_lost_times(run_summary(training_share=0.0, lost_seconds={"start": 2.0}))] == [
        1.0
    ]
