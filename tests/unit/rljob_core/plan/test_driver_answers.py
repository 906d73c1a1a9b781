"""Plans for whatever a driver answers: none raises, and each status is small and says what is wrong."""

import json
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.services.reward import RewardModel
from rljob_api.wire.driver_status import BusyShares, DriverProblem, DriverStatus, Learning, RewardDemand, ScheduleStatus
from rljob_core.backend import DRIVER_UNREADABLE, Demand, ObservedState
from rljob_core.plan.autoscale import read_demand
from rljob_core.plan.job import plan_job
from rljob_core.plan.reward_model import plan_reward_model
from rljob_operator.kube.driver_request import UnreadableAnswerError, parse_status

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ETCD_BYTES = 1_500_000
SCORE = {"function": {"inline": "def score(sample):\n    return 1.0\n"}}
SCALED = SCORE | {"autoscaling": {"maxReplicas": 50}}
HEAD = {
    "metadata": {"name": "sums-head-x", "labels": {"rljob.dev/job": "sums", "rljob.dev/role": "head"}},
    "status": {"phase": "Running", "podIP": "10.0.0.1"},
}
EDGES = [0, 1, -1, 10**9, 10**9 + 1, 10**400, 2**63, 1e9, 1e308, 5e-324, -0.0, 1e-9, float("nan"), float("inf")]
NUMBERS = st.sampled_from(EDGES) | st.floats() | st.integers() | st.none() | st.booleans()
TEXTS = st.sampled_from(["", "x" * 5000, "\x1b[31mred", "\0\ud800", DRIVER_UNREADABLE, "\n" * 50]) | st.text(max_size=9)


def answers_of(model, **known):
    """JSON objects with the fields of a type, whose values need not be valid."""
    fields = {name: known.get(name, NUMBERS | TEXTS) for name in model.model_fields}
    return st.fixed_dictionaries({}, optional=fields)


ANSWERS = answers_of(
    DriverStatus,
    demand=st.dictionaries(
        st.just("r") | TEXTS, answers_of(RewardDemand, **dict.fromkeys(RewardDemand.model_fields, NUMBERS)), max_size=3
    ),
    restarts=st.dictionaries(st.sampled_from(["head", "trainer"]) | TEXTS, NUMBERS, max_size=3),
    problems=st.lists(answers_of(DriverProblem, reward=TEXTS, reason=TEXTS, message=TEXTS), max_size=12),
    learning=answers_of(Learning, is_learning=st.sampled_from([None, True, False, "x"])),
    schedule=answers_of(ScheduleStatus, type=TEXTS, busy=answers_of(BusyShares)),
    **dict.fromkeys(["phase", "waits_for"], TEXTS),
)


def make_job(**spec):
    whole = {"model": {"source": "/m"}, "data": {"train": {"source": "/d.jsonl"}}}
    rewards = [{"name": "r", **SCALED}]
    metadata = {"name": "sums", "namespace": "ns"}
    return RLJob.model_validate({"metadata": metadata, "spec": whole | {"rewards": rewards} | spec})


def plan_three_times(plan, owner, observed):
    """Plan, store the status, and plan again; return the last status."""
    for seconds in (0, 2, 400):
        status = plan(owner, observed, NOW + timedelta(seconds=seconds), new_token=lambda: "t").status
        stored = json.dumps(status.to_manifest(), allow_nan=False, ensure_ascii=False)
        assert len(stored.encode()) < ETCD_BYTES / 10
        assert "\\u001b" not in stored
        owner = owner.model_copy(update={"status": type(status).model_validate(json.loads(stored))})
    return owner.status


@given(ANSWERS)
def test_no_answer_breaks_a_plan(answer):
    try:
        status = parse_status(json.dumps(answer).encode())
    except UnreadableAnswerError:
        return
    plan_three_times(plan_job, make_job(), ObservedState(driver=status, pods=(HEAD,)))
    model = RewardModel.model_validate({"metadata": {"name": "math", "namespace": "ns"}, "spec": SCALED})
    neighbour = Demand("ns/other", RewardDemand(samples=640, expected=640, is_open=True))
    observed = ObservedState(demands=(read_demand("sums", status, "r"), neighbour))
    plan_three_times(plan_reward_model, model, observed)


def test_largest_answer_gives_a_status_that_can_be_stored():
    text = "\U0001f600" * 10_000
    problems = [DriverProblem(reward=text, reason=text, message=text)] * 8
    learning = Learning(is_learning=False, reason=text, message=text)
    answer = DriverStatus(phase=text, waits_for=text, problems=problems, learning=learning)
    rewards = [{"name": f"r{index}", **SCALED} for index in range(16)]
    status = plan_three_times(plan_job, make_job(rewards=rewards), ObservedState(driver=answer, pods=(HEAD,)))
    assert len(status.progress.problems) == 8


@pytest.mark.parametrize("before", [None, DriverStatus(step=3, waits_for="waits for 5 completions")])
def test_unreadable_answer_is_reported_once_and_keeps_the_progress(before):
    job, problem = make_job(), f"{DRIVER_UNREADABLE}: it is larger than 64 KiB"
    events = []
    for observed in (
        ObservedState(driver=before, pods=(HEAD,)),
        ObservedState(driver_problem=problem, pods=(HEAD,)),
        ObservedState(driver_problem=problem, pods=(HEAD,)),
    ):
        plan = plan_job(job, observed, NOW, new_token=lambda: "t")
        job = job.model_copy(update={"status": plan.status})
        events += [event for event in plan.events if event.reason == "DriverUnreadable"]
    assert (job.status.progress.waits_for, job.status.progress.step) == (problem, before.step if before else 0)
    assert [(event.type, event.message) for event in events] == [("Warning", problem)]
    silent = plan_job(job, ObservedState(pods=(HEAD,)), NOW, new_token=lambda: "t")
    assert silent.status.progress.waits_for == ""


def test_status_says_what_the_schedule_does():
    busy = BusyShares(rollouts=0.974, trainer=0.31)
    schedule = ScheduleStatus(
        type="bounded", max_staleness=2, staleness=1, groups_in_flight=9, groups_scored=3, groups_due=0, busy=busy
    )
    driver = DriverStatus(schedule=schedule)
    status = plan_three_times(plan_job, make_job(), ObservedState(driver=driver, pods=(HEAD,)))
    assert status.to_manifest()["progress"]["schedule"] == {
        "type": "bounded", "staleness": 1, "groupsInFlight": 9, "groupsScored": 3, "groupsDue": 0,
        "busy": "rollouts 97%, trainer 31%",
    }  # fmt: skip


def test_driver_without_a_schedule_leaves_it_empty():
    driver = parse_status(b'{"step": 3}')
    status = plan_three_times(plan_job, make_job(), ObservedState(driver=driver, pods=(HEAD,)))
    assert status.progress.schedule is None
