"""What a failed reconcile says in the status and events, and when."""

from datetime import UTC, datetime

import pytest

from rljob_api.errors import TransientError, UserError
from rljob_api.manifest.services.reward import RewardModel
from rljob_core.backend import ForbiddenError, JobKey, RewardModelKey
from rljob_core.loop.failures import REPORT_AFTER_SECONDS, FailureTracker
from rljob_core.plan import conditions
from rljob_core.plan.conditions import RECONCILE_FAILED, build_condition
from tests.support.job_simulation import make_job

NOW = datetime(2026, 1, 1, tzinfo=UTC)
KEY, MODEL_KEY = JobKey("default", "gsm8k"), RewardModelKey("default", "math")
MODEL = RewardModel.model_validate(
    {"metadata": {"name": "math", "uid": "u2", "generation": 1}, "spec": {"function": {"inline": "x"}}}
)
SILENT = TransientError("PATCH /x: the API server did not answer")
DEFECT = ValueError("cannot convert float NaN to integer")


class Owners:
    """The one object of the API server. Writes may fail."""

    def __init__(self, owner):
        self.owner, self.events, self.num_writes = owner, [], 0
        self.status_error = self.event_error = None

    async def get_owner(self, key):
        return self.owner

    async def update_status(self, owner, status):
        self.num_writes += 1
        if self.status_error:
            raise self.status_error
        self.owner = self.owner.model_copy(update={"status": status})

    async def record_event(self, owner, event):
        if self.event_error:
            raise self.event_error
        self.events.append(event)


class Failing:
    """Reconciles of one object that fail."""

    def __init__(self, owner=None, key=KEY):
        self.backend, self.key, self.seconds = Owners(owner or make_job()), key, 0.0
        self.tracker = FailureTracker(lambda: self.seconds)

    async def fail(self, error=SILENT, *, takes=0.0, waits=0.0, status=None):
        self.seconds += waits
        attempt = self.tracker.start(self.key, NOW)
        attempt.owner, attempt.status = self.backend.owner, status
        self.seconds += takes
        await self.tracker.report(self.backend, attempt, error)

    def find(self, type_):
        return conditions.find(self.backend.owner.status, type_)

    @property
    def reasons(self):
        return [event.reason for event in self.backend.events]


def with_conditions(owner, *types, generation=1, observed=1, reason="R"):
    made = [build_condition(owner.status, t, True, reason, "", generation=observed, now=NOW) for t in types]
    update = {"conditions": made, "observed_generation": observed}
    update |= {"phase": types[0]} if owner.kind == "RLJob" else {}
    metadata = owner.metadata.model_copy(update={"generation": generation})
    return owner.model_copy(update={"status": owner.status.model_copy(update=update), "metadata": metadata})


def with_step(job, step):
    """Return the status of the job with progress."""
    return job.status.model_copy(update={"progress": job.status.progress.model_copy(update={"step": step})})


async def test_outage_is_reported_once_when_it_lasts():
    failing = Failing()
    await failing.fail()
    await failing.fail(waits=REPORT_AFTER_SECONDS - 1)
    assert (failing.backend.num_writes, failing.reasons) == (0, []), "a retry may succeed"
    for _ in range(3):
        await failing.fail(waits=1)
    assert (failing.backend.num_writes, failing.reasons) == (1, ["ApiServerError"])
    running, failed = failing.find("Running"), failing.find(RECONCILE_FAILED)
    assert (running.status, running.reason, failed.status) == ("False", "ApiServerError", "True")
    assert "the API server did not answer" in running.message
    assert failing.backend.owner.status.phase == "Pending"


async def test_one_slow_attempt_lasts_as_long_as_many():
    failing = Failing()
    await failing.fail(takes=30.0)
    assert failing.reasons == ["ApiServerError"]


async def test_failure_of_an_earlier_spec_says_nothing_of_a_later_one():
    failing = Failing()
    attempt = failing.tracker.start(KEY, NOW)
    attempt.owner = failing.backend.owner
    metadata = attempt.owner.metadata.model_copy(update={"generation": 2})
    failing.backend.owner = attempt.owner.model_copy(update={"metadata": metadata})
    await failing.tracker.report(failing.backend, attempt, DEFECT)
    assert failing.backend.num_writes == 0, "generation 2 would count as observed"


async def test_success_begins_a_new_count():
    failing = Failing()
    await failing.fail()
    failing.tracker.clear(KEY)
    await failing.fail(waits=100)
    assert failing.reasons == []


@pytest.mark.parametrize(
    ("error", "reason", "part"),
    [
        (ForbiddenError("RBAC does not allow it"), "Forbidden", "RBAC does not allow it"),
        (ForbiddenError("trainer: PodSecurity", "FailedCreate"), "FailedCreate", "trainer: PodSecurity"),
        (DEFECT, "OperatorError", "defect of the operator: ValueError: cannot convert float NaN to integer"),
        (KeyError(), "OperatorError", "defect of the operator: KeyError; its log has the traceback"),
    ],
)
@pytest.mark.parametrize("owner", [make_job(), MODEL])
async def test_what_no_retry_helps_is_reported_at_once(error, reason, part, owner):
    failing = Failing(owner, KEY if owner.kind == "RLJob" else MODEL_KEY)
    await failing.fail(error)
    await failing.fail(error)
    assert failing.reasons == [reason], "once, however often it is retried"
    waiting = failing.find("Running" if owner.kind == "RLJob" else "Ready")
    assert (waiting.status, waiting.reason) == ("False", reason)
    assert part in waiting.message


async def test_another_reason_is_another_event():
    failing = Failing()
    await failing.fail(ForbiddenError("a"))
    await failing.fail(ForbiddenError("b"))
    assert [event.message for event in failing.backend.events] == ["a", "b"]
    assert failing.find("Running").message == "b"


@pytest.mark.parametrize("owner", [make_job(), MODEL])
async def test_running_object_keeps_its_state_and_says_which_generation_stays(owner):
    working = "Running" if owner.kind == "RLJob" else "Ready"
    failing = Failing(with_conditions(owner, working, generation=3, observed=2))
    await failing.fail(ForbiddenError("a policy rejects it"))
    kept, failed = failing.find(working), failing.find(RECONCILE_FAILED)
    assert (kept.status, kept.observed_generation) == ("True", 2)
    assert failed.message == "generation 3 is not applied: a policy rejects it; generation 2 stays"
    assert failed.observed_generation == 3
    assert failing.backend.owner.status.observed_generation == 3, "it was observed, and not applied"
    if owner.kind == "RLJob":
        assert failing.backend.owner.status.phase == "Running"


async def test_running_job_reports_its_progress_while_a_change_is_refused():
    job = with_conditions(make_job(), "Running", generation=3, observed=2)
    failing = Failing(job)
    await failing.fail(ForbiddenError("no"), status=with_step(with_conditions(job, "Running", observed=3), 7))
    assert failing.backend.owner.status.progress.step == 7
    assert failing.find("Running").observed_generation == 2, "the plan assumed that the change is applied"


@pytest.mark.parametrize("end", ["Failed", "Succeeded"])
async def test_end_of_a_job_stays(end):
    failing = Failing(with_conditions(make_job(), end, reason="Ended"))
    await failing.fail(ForbiddenError("deletes are forbidden"))
    assert failing.backend.owner.status.phase == end
    assert (failing.find(end).status, failing.find(end).reason) == ("True", "Ended")
    assert failing.find("Running") is None
    assert failing.find(RECONCILE_FAILED).message == "deletes are forbidden", "its workloads may hold nodes"


async def test_refused_status_is_an_event_and_the_old_status_with_the_reason():
    failing = Failing()
    planned = with_step(make_job(), 7)
    await failing.fail(UserError("status: Too long"), takes=REPORT_AFTER_SECONDS, status=planned)
    assert failing.reasons == ["StatusRefused"]
    assert failing.backend.owner.status.progress.step == 0, "what is refused is not written again"
    assert "Too long" in failing.find("Running").message


@pytest.mark.parametrize("error", [TransientError("409"), ForbiddenError("no"), UserError("too large")])
async def test_status_that_cannot_be_written_is_retried_and_the_event_emitted(error):
    failing = Failing()
    failing.backend.status_error = error
    await failing.fail(ForbiddenError("no"))
    assert failing.reasons == ["Forbidden"]
    failing.backend.status_error = None
    await failing.fail(ForbiddenError("no"))
    assert failing.find("Running").reason == "Forbidden"
    assert failing.reasons == ["Forbidden"]


async def test_forbidden_event_does_not_keep_the_status_from_being_written():
    failing = Failing()
    failing.backend.event_error = ForbiddenError("events are forbidden")
    await failing.fail(ForbiddenError("no"))
    assert failing.find("Running").reason == "Forbidden"


async def test_deleted_object_is_not_reported():
    failing = Failing()
    await failing.fail(ForbiddenError("no"))
    writes = failing.backend.num_writes
    attempt = failing.tracker.start(KEY, NOW)
    attempt.owner, failing.backend.owner = failing.backend.owner, None
    await failing.tracker.report(failing.backend, attempt, ForbiddenError("other"))
    assert failing.backend.num_writes == writes
