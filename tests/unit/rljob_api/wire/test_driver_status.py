"""What passes from a driver's answer: bounded texts, collections and numbers."""

import json

import pytest
from pydantic import ValidationError

from rljob_api.wire.driver_status import MAX_NAMES, MAX_PROBLEMS, BusyShares, DriverStatus


def read(answer):
    return DriverStatus.model_validate_json(answer if isinstance(answer, bytes) else json.dumps(answer), extra="ignore")


def test_too_much_is_truncated():
    problem = {"reward": "correct", "reason": "exception", "message": "x" * 2000}
    names = {f"reward-{index}": {"samples": index} for index in range(100)}
    status = read({"waits_for": "w" * 1_000_000, "phase": "p" * 100, "problems": [problem] * 20, "demand": names})
    assert (len(status.waits_for), len(status.phase)) == (1000, 64)
    assert (len(status.problems), len(status.demand)) == (MAX_PROBLEMS, MAX_NAMES)
    assert len(status.problems[0].message) == 1000


def test_values_of_a_newer_driver_pass():
    status = read({"phase": "dreaming", "learning": {"is_learning": False, "reason": "TooTired"}})
    assert (status.phase, status.learning.reason) == ("dreaming", "TooTired")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400"])
@pytest.mark.parametrize("field", ["reward", "step_seconds", "step"])
def test_number_that_is_not_finite_is_invalid(field, number):
    with pytest.raises(ValidationError):
        read(f'{{"{field}": {number}}}'.encode())


@pytest.mark.parametrize("fields", ['"samples": 1' + "0" * 400, '"samples": -1', '"elapsed_seconds": 1e300'])
def test_impossible_demand_is_invalid(fields):
    with pytest.raises(ValidationError):
        read(f'{{"demand": {{"correct": {{{fields}}}}}}}'.encode())


@pytest.mark.parametrize(
    "schedule",
    ['"staleness": -1', '"trained_staleness_mean": NaN', '"busy": {"trainer": 1.01}', '"groups_due": 1' + "0" * 400],
)
def test_impossible_schedule_is_invalid(schedule):
    with pytest.raises(ValidationError):
        read(f'{{"schedule": {{{schedule}}}}}'.encode())


def test_busy_shares_as_text_leave_out_what_is_unknown():
    assert BusyShares(rollouts=1.0, rewards=0.126).describe() == "rollouts 100%, rewards 13%"
    assert read({}).schedule.busy.describe() == ""
