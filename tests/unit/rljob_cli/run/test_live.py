"""Outputs of a run, without a run."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from rljob_api.wire.driver_status import BusyShares, DriverStatus, Learning, ScheduleStatus
from rljob_cli.run.live import JsonOutput, LiveOutput, PlainOutput, format_seconds, make_output, render
from rljob_cli.run.snapshot import RoleRow, Snapshot
from tests.support.records import container_failure, evaluation_record, step_record

FAILURE = container_failure(pod="sums-head-0", role="head", exit_code=75, message="no space left")
STEP = step_record(1, reward=0.5)
SNAPSHOT = Snapshot(
    name="sums", phase="Running", roles=(RoleRow("head", 1, 1, 0),), steps=(STEP,), total_steps=2, failures=(FAILURE,)
)


def console(**options):
    return Console(file=io.StringIO(), width=100, **options)


def test_plain_output_prints_one_line_per_change_once():
    output = console()
    plain = PlainOutput(output)
    plain.show(SNAPSHOT)
    plain.show(SNAPSHOT)
    assert output.file.getvalue().splitlines() == [
        "[    0s] Running",
        "[    0s] head: 1 of 1 ready",
        "[    0s] head: sums-head-0 ended with exit code 75: no space left",
        "[    0s] step 1/2  reward 0.500",
    ]


def test_steps_of_an_earlier_session_are_not_shown_again():
    output = console()
    plain = PlainOutput(output)
    earlier, evals = tuple(map(step_record, (1, 2, 3))), (evaluation_record(0, 0.5),)
    plain.begin(Snapshot(steps=earlier, evals=evals))
    plain.show(Snapshot(steps=earlier, evals=evals, total_steps=4))
    assert output.file.getvalue() == ""
    plain.show(Snapshot(steps=earlier[:2], evals=evals, total_steps=4))
    plain.show(Snapshot(steps=earlier, evals=evals, total_steps=4))
    assert output.file.getvalue().splitlines() == ["[    0s] resumed after step 2", "[    0s] step 3/4"]


def test_evaluation_has_the_numbers_of_failed_and_left_out_episodes():
    evals = (evaluation_record(0, 0.5, num_failed=3, num_left_out=2), evaluation_record(2, 0.75))
    output = console()
    PlainOutput(output).show(Snapshot(evals=evals))
    assert output.file.getvalue().splitlines() == [
        "[    0s] evaluation after step 0: accuracy 0.500 (3 failed, counted as 0, 2 without a score, left out)",
        "[    0s] evaluation after step 2: accuracy 0.750",
    ]
    output = console(force_terminal=True)
    live = LiveOutput(output)
    live.show(Snapshot(evals=evals[:1]))
    live.close()
    assert "held out; 3 failed, counted as 0, 2 without a score, left out" in output.file.getvalue()


def test_json_output_prints_one_object_per_change(capsys):
    JsonOutput(console()).show(SNAPSHOT)
    objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [found["type"] for found in objects] == ["phase", "role", "failure", "step"]
    assert objects[-1] == {"elapsed_seconds": 0.0, **STEP.model_dump()}


def test_live_output_scrolls_failures_above_the_view():
    output = console(force_terminal=True)
    live = LiveOutput(output)
    live.show(SNAPSHOT)
    live.close()
    text = output.file.getvalue()
    assert "ended with exit code 75" in text
    assert "step 1/2" in text


def test_live_output_keeps_the_reason_of_a_failed_job_on_the_screen():
    output = console(force_terminal=True)
    live = LiveOutput(output)
    live.show(Snapshot(phase="Failed", message="rollout: spec.rollout.maxModelLen: too long"))
    live.close()
    assert "Failed: rollout: spec.rollout.maxModelLen: too long" in output.file.getvalue()


def test_live_view_shows_the_schedule_and_what_each_role_did():
    busy = BusyShares(rollouts=1.0, rewards=0.8, trainer=0.31)
    schedule = ScheduleStatus(type="bounded", max_staleness=2, staleness=1, groups_in_flight=9, groups_due=0, busy=busy)
    drawn = console()
    drawn.print(render(Snapshot(driver=DriverStatus(schedule=schedule)), []))
    text = drawn.file.getvalue()
    assert "staleness 1 of 2; groups: 9 in flight, 0 due" in text
    assert "rollouts 100%, rewards 80%, trainer 31%" in text
    drawn = console()
    drawn.print(render(Snapshot(driver=DriverStatus()), []))
    assert "schedule" not in drawn.file.getvalue(), "an older driver"


def test_live_view_shows_that_the_model_learns_nothing():
    learning = Learning(is_learning=False, reason="NoAdvantages", message="since step 2 ...")
    drawn = console()
    drawn.print(render(Snapshot(driver=DriverStatus(learning=learning)), []))
    [line] = [line for line in drawn.file.getvalue().splitlines() if line.startswith("learning")]
    assert line.split() == ["learning", "no", "since", "step", "2", "..."]


@pytest.mark.parametrize(
    ("snapshot", "line"),
    [
        (Snapshot(driver=DriverStatus(phase="rollout", waits_for="waits for a score")), "rollout: waits for a score"),
        (Snapshot(driver=DriverStatus(phase="train")), "train"),
        (Snapshot(roles=(RoleRow("head", 1, 0, 0),)), "waiting for Pods: head 0/1"),
        (Snapshot(phase="Succeeded", message="all steps are done"), "all steps are done"),
    ],
)
def test_live_view_shows_what_the_job_waits_for(snapshot, line):
    output = console()
    output.print(render(snapshot, []))
    assert line in [shown.rstrip() for shown in output.file.getvalue().splitlines()]


@pytest.mark.parametrize(
    ("kind", "is_terminal", "expected"),
    [
        ("live", True, LiveOutput),
        ("live", False, PlainOutput),
        ("plain", True, PlainOutput),
        ("json", True, JsonOutput),
    ],
)
def test_output_is_live_only_on_a_terminal(kind, is_terminal, expected):
    output = make_output(kind, console(force_terminal=is_terminal))
    output.close()
    assert type(output) is expected


@pytest.mark.parametrize(("seconds", "text"), [(59.4, "59s"), (61, "1m01s"), (3660, "1h01m")])
def test_elapsed_time_has_two_units(seconds, text):
    assert format_seconds(seconds) == text


def test_a_long_step_says_what_it_does():
    output = console()
    plain = PlainOutput(output)
    driver = DriverStatus(phase="generate", waits_for="generates 12 of 64 samples")

    def show(seconds, phase="Running", waits_for=driver.waits_for):
        status = driver.model_copy(update={"waits_for": waits_for})
        plain.show(Snapshot(phase=phase, driver=status, steps=(STEP,), total_steps=3, elapsed_seconds=seconds))

    for seconds in (1, 10, 20, 21, 30, 40):
        show(seconds)
    show(41, waits_for="generates 3 of 64 samples")
    show(50, phase="Succeeded")
    show(90, phase="Succeeded")
    assert output.file.getvalue().splitlines() == [
        "[    1s] Running",
        "[    1s] step 1/3  reward 0.500",
        "[   21s] step 2/3, generate: generates 12 of 64 samples",
        "[   41s] step 2/3, generate: generates 3 of 64 samples",
        "[   50s] Succeeded",
    ]


def test_a_long_start_says_what_it_waits_for():
    output = console()
    plain = PlainOutput(output)
    for seconds in (0, 25):
        plain.show(Snapshot(phase="Pending", roles=(RoleRow("rollout", 1, 0, 0),), elapsed_seconds=seconds))
    assert output.file.getvalue().splitlines()[-1] == "[   25s] rollout 0/1"
