"""What a run reports, and that it reports it once."""

from __future__ import annotations

import pytest
from rich.console import Console

from rljob_api.manifest.status import RewardProblem, RLJobStatus, RoleStatus
from rljob_api.wire.driver_status import DriverStatus, HungPart, Outage
from rljob_cli.run.live import render, sparkline
from rljob_cli.run.reward_rows import RewardRow
from rljob_cli.run.snapshot import RoleRow, RunHistory, Snapshot, build_roles, diff_snapshots
from tests.support.records import container_failure, step_record

RANK = HungPart(role="trainer", name="rank 3", seconds=80, limit_seconds=60)


def step(number, **fields):
    return step_record(number, **{"reward": 0.5, "step_seconds": 2.0} | fields)


def texts(old, new):
    return [change.text for change in diff_snapshots(old, new)]


def test_each_step_is_reported_once():
    first = Snapshot(phase="Running", steps=(step(1),), total_steps=3)
    second = Snapshot(phase="Running", steps=(step(1), step(2)), total_steps=3)
    assert texts(Snapshot(phase="Running"), first) == ["step 1/3  reward 0.500  2.0 s"]
    assert texts(first, second) == ["step 2/3  reward 0.500  2.0 s"]
    assert texts(second, second) == []


def test_step_of_a_warm_start_says_so_with_its_loss():
    record = step(1, num_samples=0, reward=None, loss=1.25)
    assert texts(Snapshot(), Snapshot(steps=(record,), total_steps=3)) == ["step 1/3  warm start: loss 1.250  2.0 s"]


def test_truncated_history_is_reported_as_resumed():
    before = Snapshot(steps=(step(1), step(2), step(3)), total_steps=4)
    after = Snapshot(steps=(step(1), step(2)), total_steps=4)
    assert texts(before, after) == ["resumed after step 2"]


def test_role_is_reported_when_it_changes():
    before = Snapshot(roles=(RoleRow("rollout", 2, 1, 0),))
    assert texts(before, Snapshot(roles=(RoleRow("rollout", 2, 2, 0),))) == ["rollout: 2 of 2 ready"]
    assert texts(before, before) == []


def test_remaining_time_is_estimated_from_the_median_step():
    steps = tuple(step(i, step_seconds=s) for i, s in enumerate([100, 2, 2], start=1))
    assert Snapshot(steps=steps, total_steps=5).eta_seconds == 4


def test_restarts_of_deleted_pods_still_count():
    history = RunHistory()
    labels = {"rljob.dev/role": "reward", "rljob.dev/reward": "r"}
    ended = {"reason": "Error", "exitCode": 1, "finishedAt": "t", "message": "boom"}
    status = {"name": "c", "restartCount": 2, "state": {}, "lastState": {"terminated": ended}}
    pod = {"metadata": {"name": "p", "uid": "1", "labels": labels}, "status": {"containerStatuses": [status]}}
    for _ in range(2):
        history.record([pod])
    history.record([])
    assert history.restarts == {"reward-r": 2}
    assert [failure.message for failure in history.failures] == ["boom"]


def test_roles_are_in_order_with_the_agents_last():
    names = {"agent": "user", "reward": "r", "rollout": "", "head": ""}
    pods = [
        {"metadata": {"name": role, "labels": {"rljob.dev/role": role, f"rljob.dev/{role}": name}}, "status": {}}
        for role, name in names.items()
    ]
    status = RLJobStatus(roles=[RoleStatus(name="agent-user", desired=2)])
    rows = build_roles(status, pods, {"agent-user": 3})
    assert [row.name for row in rows] == ["head", "rollout", "reward-r", "agent-user"]
    assert rows[-1] == RoleRow("agent-user", 2, 0, 3)


def test_sparkline_is_scaled_from_minimum_to_maximum():
    assert sparkline([0, 1, 2]) == "▁▅█"
    assert sparkline([1, 1]) == "▁▁"


@pytest.mark.parametrize("width", [80, 120])
def test_narrow_terminal_cuts_invalid_reasons_and_no_number(width):
    row = RewardRow(
        "correct", "function", 12, 12, 320, 192, 192, 1024, 12.0, 0.8, 31.0, {"timeout": 3, "exception": 12}
    )
    console = Console(width=width)
    with console.capture() as drawn:
        console.print(render(Snapshot(rewards=(row, RewardRow("remote", "http"))), []))
    [line] = [line for line in drawn.get().splitlines() if line.startswith("correct")]
    numbers = ["correct", "function", "12/12", "320", "192", "192", "1024", "12s", "0.8s", "31s", "3", "timeout,"]
    assert line.split()[: len(numbers)] == numbers


def failed(code, message, *, pod="p-1", role="rollout"):
    return container_failure(pod=pod, role=role, exit_code=code, message=message, log=f"/run/logs/{pod}.log")


def test_user_error_is_shown_once_with_its_log_whichever_snapshot_sees_it_first():
    error = failed(78, "INFO loading\nerror: spec.rollout.maxModelLen: vLLM does not start: too long")
    running, ended = Snapshot(phase="Pending"), Snapshot(phase="Pending", failures=(error,))
    message = "rollout: spec.rollout.maxModelLen: vLLM does not start: too long"
    final = Snapshot(phase="Failed", message=message, failures=(error,), events=(f"UserError: {message}",))
    shown = [text for text in texts(running, ended) + texts(ended, final) if text]
    assert shown == [f"Failed: {message}\n    log: /run/logs/p-1.log"]
    assert [text for text in texts(running, final) if text] == shown
    assert [change.data["type"] for change in diff_snapshots(running, ended)] == ["failure"], "programs get each end"


def test_nothing_follows_the_cause_of_a_failed_job():
    before = Snapshot(phase="Running", roles=(RoleRow("head", 1, 1, 0),))
    assert texts(before, Snapshot(phase="Failed", message="why", roles=(RoleRow("head", 0, 0, 0),))) == ["Failed: why"]


def test_crash_is_one_line_with_its_log_and_repetitions_are_short():
    first = failed(1, "INFO a\n" * 9 + "Traceback (most recent call last):\n  x\nRuntimeError: boom\nINFO bye\n")
    second = failed(1, first.message, pod="p-2")
    before, after = Snapshot(failures=(first,)), Snapshot(failures=(first, second))
    assert texts(Snapshot(), before) == [
        "rollout: p-1 ended with exit code 1: RuntimeError: boom\n    log: /run/logs/p-1.log"
    ]
    assert texts(before, after) == ["rollout: p-2 ended with exit code 1: the same error again"]


def test_problem_of_a_reward_is_shown_once_and_its_event_not_at_all():
    problem = RewardProblem(reward="correct", reason="exception", message="f.py:3: KeyError: 'a'", step=2)
    event = "InvalidSamples: reward correct: no valid score (exception): f.py:3: KeyError: 'a'"
    after = Snapshot(problems=(problem,), events=(event,))
    assert [change.text for change in diff_snapshots(Snapshot(), after) if change.text] == [
        "reward correct: no valid score (exception): f.py:3: KeyError: 'a'"
    ]
    assert texts(after, after) == []


def test_damaged_checkpoint_is_shown_once():
    problem = RewardProblem(reward="spec.checkpoint", reason="damaged", message="driver.json has ...", step=2)
    after = Snapshot(problems=(problem,), events=(f"CheckpointDamaged: {problem.describe()}",))
    shown = [change.text for change in diff_snapshots(Snapshot(), after) if change.text]
    assert shown == ["spec.checkpoint: damaged: driver.json has ..."]


def test_outage_is_reported_when_it_begins_and_when_it_ends():
    def seen(*outages):
        return Snapshot(driver=DriverStatus(outages=list(outages)))

    first = Outage(what="spec.rewards[0].http (http://r)", seconds=12, limit_seconds=21600, message="503 gone")
    later = first.model_copy(update={"seconds": 70, "message": "refused"})
    assert texts(seen(), seen(first)) == [
        "spec.rewards[0].http (http://r) is away: 503 gone; the job waits for at most 21600 s"
    ]
    assert texts(seen(first), seen(later)) == []
    assert texts(seen(later), seen()) == ["spec.rewards[0].http (http://r) is back after 70 s"]


@pytest.mark.parametrize("reason", ["NoAdvantages", "PartHung", "ProgressDeadlineExceeded"])
def test_warning_that_nothing_is_learned_or_finished_stays_on_the_screen(reason):
    [change] = diff_snapshots(Snapshot(), Snapshot(events=(f"{reason}: since step 2 ...",)))
    assert change.is_urgent
    assert change.text == f"{reason}: since step 2 ..."


@pytest.mark.parametrize(
    ("snapshot", "expected"),
    [
        (Snapshot(driver=DriverStatus(waits_for="waits for 3 of 8 completions")), "waits for 3 of 8 completions"),
        (Snapshot(roles=(RoleRow("rollout", 2, 1, 0),)), "rollout 1/2"),
        (
            Snapshot(driver=DriverStatus(hung=[RANK], waits_for="waits for 3 of 8 completions")),
            "trainer: rank 3 hangs for 80 s; waits for 3 of 8 completions",
        ),
    ],
)
def test_what_a_job_waits_for_is_composed_once(snapshot, expected):
    assert snapshot.waits_for == expected
    console = Console(width=120)
    with console.capture() as drawn:
        console.print(render(snapshot, []))
    assert drawn.get().count("waits for") == expected.count("waits for")
