"""Statuses of drivers that are kept between polls: whole, small, and compared without what passes."""

import pytest

from rljob_api.wire.driver_status import DriverProblem, DriverStatus, HungPart, Outage, RewardDemand, ScheduleStatus
from rljob_operator.kube.kept_status import keep_lasting, keep_status, read_status

PART = HungPart(role="trainer", name="rank 3", seconds=5, limit_seconds=9)
OUTAGE = Outage(what="a judge", seconds=5, limit_seconds=9, message="refused")
STATUS = DriverStatus(
    step=3,
    phase="generate",
    reward=0.25,
    since_step_seconds=4.5,
    hung=[PART],
    outages=[OUTAGE],
    schedule=ScheduleStatus(type="async", groups_in_flight=0),
    problems=[DriverProblem(reward="correct", reason="exception", message="boom")],
    demand={"correct": RewardDemand(samples=64)},
)


@pytest.mark.parametrize("status", [STATUS, DriverStatus()])
def test_kept_status_is_read_whole(status):
    assert read_status(keep_status(status)) == status


def test_defaults_take_no_memory():
    assert keep_status(DriverStatus.model_validate(DriverStatus().model_dump())) == b"{}"


@pytest.mark.parametrize(
    "passing",
    [
        {"since_step_seconds": 5.5},
        {"training_share": 0.5},
        {"lost_seconds": {"start": 9.0}},
        {"demand": {}},
        {"hung": [PART.model_copy(update={"seconds": 6.0})]},
        {"outages": [OUTAGE.model_copy(update={"seconds": 6.0, "message": "timed out"})]},
    ],
    ids=lambda passing: next(iter(passing)),
)
def test_what_passes_makes_no_difference(passing):
    assert keep_lasting(STATUS.model_copy(update=passing)) == keep_lasting(STATUS)


@pytest.mark.parametrize("lasting", [{"step": 4}, {"hung": []}, {"outages": []}, {"problems": []}])
def test_what_lasts_makes_a_difference(lasting):
    assert keep_lasting(STATUS.model_copy(update=lasting)) != keep_lasting(STATUS)
