"""job://NAME@STEP on a cluster: the claim of another job, what is missing, and what survives that job's deletion."""

from datetime import UTC, datetime, timedelta

import pytest
import yaml

from rljob_api.wire.contract import ENV_MODEL, ENV_MODEL_STEP
from rljob_api.wire.driver_status import DriverStatus
from rljob_core.backend import PROGRESS_POLL_SECONDS, ObservedState, StartJob, key_of
from rljob_core.children import WORKLOAD_KINDS
from rljob_core.children.start_model import parse_start, with_any_claim
from rljob_core.plan import conditions
from rljob_core.plan.built_children import BuiltChildren
from rljob_core.plan.job import plan_job, render_children
from rljob_core.plan.start_model import MISSING, NOT_EXPORTED, read_start_job
from tests.support.job_simulation import make_job
from tests.unit.rljob_core.plan.test_policy_limits import make_policy

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ENDED = StartJob(claim="runs", has_ended=True)
OWN = {"checkpoint": {"persistentVolumeClaim": {"claimName": "mine", "mountedBy": "head"}}}


def start_from(source="job://sums@20", **spec):
    return make_job(model={"source": source}, **spec)


def make_plan(job, start_job=ENDED, children=(), now=NOW, **options):
    observed = ObservedState(children={key_of(child): child for child in children}, start_job=start_job)
    return plan_job(job, observed, now, new_token=lambda: "t", **options)


def with_status(job, plan, **spec):
    changed = job.spec.model_copy(update=spec)
    return job.model_copy(update={"status": plan.status, "spec": changed})


def pod_of(plan, role):
    found = next(c for c in plan.children if c["kind"] in WORKLOAD_KINDS and c["metadata"]["name"] == f"gsm8k-{role}")
    return found["spec"]["template"]["spec"]


def read_running(plan):
    return conditions.find(plan.status, conditions.RUNNING)


def find_claims(pod):
    claims = [volume.get("persistentVolumeClaim") for volume in pod["volumes"]]
    return {claim["claimName"]: claim.get("readOnly", False) for claim in claims if claim}


@pytest.mark.parametrize("role", ["head", "trainer", "rollout"])
def test_pods_mount_the_claim_of_the_other_job_read_only(role):
    pod = pod_of(make_plan(start_from()), role)
    env = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
    assert (env[ENV_MODEL], env[ENV_MODEL_STEP]) == ("/mnt/pvc/runs/sums", "20")
    assert find_claims(pod) == {"runs": True}


def test_pods_of_other_sources_have_no_step():
    pod = pod_of(make_plan(make_job(), None), "head")
    assert ENV_MODEL_STEP not in {each["name"] for each in pod["containers"][0]["env"]}
    assert make_plan(make_job(), None).status.start_model is None


def test_claim_that_both_jobs_use_is_one_volume():
    own = {"checkpoint": {"persistentVolumeClaim": {"claimName": "runs"}}}
    head, rollout = (pod_of(make_plan(start_from(**own)), role) for role in ("head", "rollout"))
    assert (find_claims(head), find_claims(rollout)) == ({"runs": False}, {"runs": True})
    mount = next(m for m in head["containers"][0]["volumeMounts"] if m["mountPath"] == "/mnt/pvc/runs")
    assert mount["readOnly"]


@pytest.mark.parametrize(
    ("found", "spec", "reason", "expected"),
    [
        (None, {}, MISSING, "needs RLJob sums, which does not exist in the namespace default; create it"),
        (StartJob(has_ended=True), {}, MISSING, "set spec.checkpoint.persistentVolumeClaim in sums"),
        (StartJob(storage="s3://b/runs/"), {}, MISSING, "keeps its files in s3://b/runs/sums; name its export there"),
        (StartJob("runs", trains=False, has_ended=True), {}, MISSING, "RLJob sums evaluates one (spec.task: evaluate)"),
        (
            StartJob("runs", exports="never"),
            OWN,
            MISSING,
            "set spec.checkpoint.exportPolicy in sums to last, best or every",
        ),
        (
            StartJob("runs", step=7, has_ended=True, failure="HeadFailed"),
            OWN,
            MISSING,
            "RLJob sums has failed at step 7 (HeadFailed): it exports its model at its end "
            "(spec.checkpoint.exportPolicy: last), so no export will come. Correct and retry sums (kubectl "
            "rljob resume --retry sums), or name an export that is on its claim: pvc://runs/sums/exports/step-...",
        ),
        (
            StartJob("runs", exports="every", step=7, has_ended=True, failure="UserError"),
            OWN,
            MISSING,
            "has failed at step 7 (UserError): it exports it after step 20 "
            "(spec.checkpoint.exportPolicy: every), so no ",
        ),
        (StartJob("runs"), OWN, NOT_EXPORTED, "exports its model at its end (spec.checkpoint.exportPolicy: last)"),
        (
            StartJob("runs", exports="best"),
            {},
            NOT_EXPORTED,
            "(spec.checkpoint.exportPolicy: best); this job starts then",
        ),
    ],
)
def test_what_is_missing_is_in_the_status_at_once_and_no_pod_is_created(found, spec, reason, expected):
    job = start_from(**spec)
    plan = make_plan(job, found)
    running = read_running(plan)
    assert (plan.children, plan.delete, plan.status.phase) == ((), (), "Pending")
    assert running.reason == reason
    assert running.message.startswith("spec.model.source: job://sums@20 ")
    assert expected in running.message
    assert [event.reason for event in plan.events] == [reason]
    again = make_plan(with_status(job, plan), found, now=NOW + timedelta(seconds=30))
    assert (again.status, again.events) == (plan.status, ()), "said once"
    assert again.requeue_after_seconds == PROGRESS_POLL_SECONDS, "a status that the operator writes is no event for it"
    started = make_plan(with_status(job, again), ENDED)
    assert started.status.start_model.claim == "runs", "it starts when the other job has its model"
    assert pod_of(started, "head")


def test_suspended_job_stays_suspended_and_says_what_is_missing():
    plan = make_plan(start_from(suspend=True), None)
    assert plan.status.phase == "Suspended"
    assert "does not exist" in conditions.find(plan.status, conditions.SUSPENDED).message


@pytest.mark.parametrize(("source", "first"), [("job://sums@20", 21), ("job://sums", 11)])
def test_job_that_exports_each_checkpoint_need_not_end(source, first):
    waiting, ready = (StartJob("runs", exports="every", step=step) for step in (first - 1, first))
    plan = make_plan(start_from(source), waiting)
    assert (plan.children, read_running(plan).reason) == ((), NOT_EXPORTED)
    assert f"exports it after step {first - 1} (spec.checkpoint.exportPolicy: every)" in read_running(plan).message
    assert make_plan(start_from(source), ready).children


def test_best_step_is_waited_for_until_the_other_job_has_ended():
    """Before, best.json may name the model before training, or a step without a checkpoint, and the head would fail."""
    job, trains = start_from("job://sums@best"), StartJob("runs", exports="every", step=500)
    plan = make_plan(job, trains)
    assert (plan.children, read_running(plan).reason) == ((), NOT_EXPORTED)
    assert "the best step of RLJob sums is known at its end" in read_running(plan).message
    assert make_plan(job, trains._replace(has_ended=True)).children


@pytest.mark.parametrize("source", ["job://sums@20", "job://sums", "job://sums@best"])
def test_exports_of_a_failed_job_count(source):
    failed = StartJob("runs", exports="every", step=25, has_ended=True, failure="HeadFailed")
    assert make_plan(start_from(source), failed).children, "only Pods see which there are"


def test_job_that_has_failed_and_is_retried_is_waited_for():
    failed = StartJob("runs", step=7, has_ended=True, failure="HeadFailed")
    job = start_from()
    waiting = make_plan(job, failed)
    trains = make_plan(with_status(job, waiting), StartJob("runs", step=8))
    assert (read_running(waiting).reason, read_running(trains).reason) == (MISSING, NOT_EXPORTED)


def test_job_cannot_start_from_itself():
    assert "names this job itself" in read_running(make_plan(start_from("job://gsm8k@2"))).message


def test_folder_of_a_deleted_job_is_looked_for_on_the_own_claim():
    plan = make_plan(start_from(**OWN), None)
    assert plan.status.start_model.to_manifest() == {"job": "sums", "claim": "mine"}
    assert find_claims(pod_of(plan, "rollout")) == {"mine": True}


def test_other_job_may_be_applied_after_this_one():
    """Else this one's Pods look for the folder on their own claim before there is one, and the job fails."""
    job = start_from(**OWN)
    created = {"creationTimestamp": NOW.isoformat().replace("+00:00", "Z")}
    job = job.model_copy(update={"metadata": job.metadata.model_validate({**job.metadata.to_manifest(), **created})})
    waiting = make_plan(job, None, now=NOW + timedelta(seconds=59))
    assert (waiting.children, read_running(waiting).reason) == ((), MISSING)
    assert find_claims(pod_of(make_plan(with_status(job, waiting)), "rollout")) == {"runs": True}
    assert find_claims(pod_of(make_plan(job, None, now=NOW + timedelta(seconds=60)), "rollout")) == {"mine": True}


@pytest.mark.parametrize("later", [None, StartJob("elsewhere"), StartJob(exports="never")])
@pytest.mark.parametrize("spec", [{}, OWN])
def test_job_with_pods_keeps_its_claim_whatever_happens_to_the_other_job(spec, later):
    job = start_from(**spec)
    first = make_plan(job)
    running = with_status(job, first)
    second = make_plan(running, later, first.children)
    assert (second.children, second.delete) == (first.children, ())
    without_head = [child for child in first.children if child["kind"] != "Job"]
    assert pod_of(make_plan(running, later, without_head), "head") == pod_of(first, "head"), "a restart of the head"


def read_file(plan):
    config = next(c for c in plan.children if c["kind"] == "ConfigMap" and c["metadata"]["name"] == "gsm8k-config")
    return yaml.safe_load(config["data"]["job.yaml"])


@pytest.mark.parametrize("spec", [{}, OWN])
def test_step_that_the_head_reports_stays_and_reaches_a_head_without_the_runs_files(spec):
    job = start_from("job://sums", **spec)
    first = make_plan(job)
    assert "status" not in read_file(first)
    running = with_status(job, first)
    observed = ObservedState({key_of(child): child for child in first.children}, driver=DriverStatus(start_step=20))
    chosen = plan_job(running, observed, NOW, new_token=lambda: "t")
    placed = {"job": "sums", "claim": "runs", "step": 20}
    assert chosen.status.start_model.to_manifest() == placed
    assert read_file(chosen)["status"] == {"startModel": placed}
    assert pod_of(chosen, "head") == pod_of(first, "head"), "no Pod is replaced"
    later = make_plan(with_status(job, chosen), StartJob("runs", has_ended=True, step=90), chosen.children)
    assert later.status.start_model.step == 20, "no driver answers"
    moved = make_plan(with_status(job, chosen), StartJob("moved", has_ended=True))
    assert moved.status.start_model.to_manifest() == placed | {"claim": "moved"}
    other = make_plan(with_status(start_from("job://other"), chosen), ENDED)
    assert other.status.start_model.step is None


def test_resumed_job_follows_the_other_job_and_starts_without_it():
    job = start_from()
    placed = with_status(job, make_plan(job))
    assert find_claims(pod_of(make_plan(placed, StartJob("moved", has_ended=True)), "head")) == {"moved": True}
    assert find_claims(pod_of(make_plan(placed, None), "head")) == {"runs": True}, "the other job is deleted"
    trains_on = StartJob("runs", exports="last")
    assert find_claims(pod_of(make_plan(placed, trains_on), "head")) == {"runs": True}, "the head has its step"


def test_other_source_forgets_the_claim():
    placed = with_status(start_from(), make_plan(start_from()))
    assert make_plan(with_status(make_job(), placed), None).status.start_model is None
    other = with_status(start_from("job://other"), placed)
    waiting = make_plan(other, None)
    assert read_running(waiting).reason == MISSING
    back = with_status(start_from(), waiting)
    assert find_claims(pod_of(make_plan(back, None), "head")) == {"runs": True}, "the change is taken back"


def test_changed_source_that_is_missing_stops_nothing_that_runs():
    job = make_job()
    first = make_plan(job, None)
    changed = start_from()
    ready = first.status.model_copy(
        update={
            "conditions": [
                c.model_copy(update={"status": "True"}) if c.type == conditions.RUNNING else c
                for c in first.status.conditions
            ]
        }
    )
    changed = changed.model_copy(update={"status": ready})
    plan = make_plan(changed, None, first.children)
    assert (plan.children, plan.delete) == ((), ())
    failed = conditions.find(plan.status, conditions.FAILED)
    assert (failed.reason, conditions.is_true(plan.status, conditions.RUNNING)) == ("InvalidSpec", True)
    assert "job://sums@20 needs RLJob sums" in failed.message


def test_limits_of_the_namespace_hold():
    policy = make_policy(gpus=1)
    job = start_from(trainer={"gpusPerReplica": 2})
    observed = ObservedState(start_job=ENDED, policy=policy)
    plan = plan_job(job, observed, NOW)
    assert plan.children == ()
    assert "at most 1 GPUs" in conditions.find(plan.status, conditions.FAILED).message


def test_children_that_are_remembered_have_their_own_claim():
    build = BuiltChildren().build
    job = start_from()
    plans = [make_plan(job, StartJob(claim, has_ended=True), build=build) for claim in ("a", "b")]
    assert [find_claims(pod_of(plan, "trainer")) for plan in plans] == [{"a": True}, {"b": True}]


def test_job_is_rendered_with_its_own_claim_or_a_placeholder():
    for spec, claim in ((OWN, "mine"), ({}, "sums")):
        children = render_children(start_from(**spec), "t")
        rollout = next(c for c in children if c["kind"] == "Deployment" and c["metadata"]["name"] == "gsm8k-rollout")
        assert find_claims(rollout["spec"]["template"]["spec"]) == {claim: True}
    assert with_any_claim(make_job()).status.start_model is None
    placed = with_status(start_from("job://other"), make_plan(start_from()))
    assert with_any_claim(placed).status.start_model.job == "other", "its status is of an earlier source"
    assert parse_start(make_job()) is None


def test_job_with_unknown_fields_says_where_its_files_are():
    metadata = {"name": "sums"}
    assert read_start_job({"metadata": metadata, "spec": {"unknown": 1}}) == StartJob()
    assert not read_start_job({"metadata": metadata, "spec": {"task": "evaluate"}}).trains
    checkpoint = {"persistentVolumeClaim": {"claimName": "runs"}, "export": "every"}
    checkpoint |= {"everySteps": 5}
    status = {"phase": "Running", "progress": {"step": 7}}
    found = read_start_job({"metadata": metadata, "spec": {"checkpoint": checkpoint}, "status": status})
    assert found == StartJob("runs", exports="every", every_steps=5, step=7)
    failed = {"type": "Failed", "status": "True", "reason": "HeadFailed"}
    ended = read_start_job({"metadata": metadata, "spec": {}, "status": {"conditions": [failed]}})
    assert (ended.has_ended, ended.failure) == (True, "HeadFailed")
    succeeded = failed | {"type": "Succeeded"}
    ended = read_start_job({"metadata": metadata, "spec": {}, "status": {"conditions": [succeeded]}})
    assert (ended.has_ended, ended.failure) == (True, "")
    refused = {"phase": "Failed", "conditions": [failed | {"reason": "InvalidSpec"}]}
    assert not read_start_job({"metadata": metadata, "spec": {}, "status": refused}).has_ended, "it may still train"
    assert read_start_job({"metadata": metadata | {"deletionTimestamp": "x"}, "spec": {}}) is None
