"""Reconcile with a small API server in memory, whose calls fail and whose objects are changed by others."""

import asyncio
import contextlib
from datetime import timedelta

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rljob_api.errors import TransientError, UserError
from rljob_api.manifest.job import RLJob
from rljob_core.backend import (
    ChildKey,
    ForbiddenError,
    ForeignObjectError,
    InvalidOwnerError,
    UnknownFieldsError,
)
from rljob_core.children import WORKLOAD_KINDS
from rljob_core.loop import reconcile as reconcile_module
from rljob_core.loop.failures import FailureTracker
from rljob_core.loop.reconcile import CONFLICT_RETRY_SECONDS, reconcile
from rljob_core.plan import conditions
from rljob_core.plan.lifecycle import USER_ERROR
from tests.support.memory_backend import (
    KEY,
    MODEL_KEY,
    NUM_CHILDREN,
    OWNERS,
    START,
    MemoryBackend,
    make_job,
    make_model,
    reward,
    workloads_of,
)


@pytest.fixture
def backend():
    return MemoryBackend(make_job())


@pytest.mark.parametrize(
    ("owner", "key", "num_children"), [(make_job(), KEY, NUM_CHILDREN), (make_model(), MODEL_KEY, 5)]
)
async def test_new_owner_gets_all_children_and_a_second_reconcile_writes_nothing(owner, key, num_children):
    backend, unchanged = MemoryBackend(owner), []

    def on_unchanged(owner, observed, wanted):
        unchanged.append(len(observed.children))

    await reconcile(backend, key, START, on_unchanged=on_unchanged)
    assert len(backend.objects) == num_children
    assert backend.writes[-1] == "status", "one status write, at the end"
    assert unchanged == []
    backend.writes.clear()
    backend.events.clear()
    await reconcile(backend, key, START + timedelta(seconds=10), on_unchanged=on_unchanged)
    assert (backend.writes, backend.events) == ([], [])
    assert unchanged == [num_children]


async def test_deleted_child_is_recreated_and_changed_child_is_reverted(backend):
    await reconcile(backend, KEY, START)
    del backend.objects[ChildKey("Service", "gsm8k-rollout")]
    backend.objects[ChildKey("Deployment", "gsm8k-rollout")]["spec"]["replicas"] = 7
    backend.writes.clear()
    await reconcile(backend, KEY, START)
    assert backend.writes == ["apply Service gsm8k-rollout", "apply Deployment gsm8k-rollout"]
    assert backend.objects[ChildKey("Deployment", "gsm8k-rollout")]["spec"]["replicas"] == 1


async def test_removed_setting_leaves_the_child(backend):
    backend.owner = make_job(rollout={"nodePool": {"nodeSelector": {"pool": "a"}}})
    await reconcile(backend, KEY, START)
    backend.owner = make_job().model_copy(update={"status": backend.owner.status})
    await reconcile(backend, KEY, START)
    assert "nodeSelector" not in backend.objects[ChildKey("Deployment", "gsm8k-rollout")]["spec"]["template"]["spec"]


async def test_additions_of_others_to_a_child_stay_and_cause_no_write(backend):
    await reconcile(backend, KEY, START)
    backend.objects[ChildKey("Deployment", "gsm8k-rollout")]["metadata"]["annotations"]["other"] = "tool"
    backend.writes.clear()
    await reconcile(backend, KEY, START)
    assert backend.writes == []


@pytest.mark.parametrize("key", [KEY, MODEL_KEY])
async def test_deleted_owner_needs_no_reconcile(backend, key):
    backend.owner = None
    assert await reconcile(backend, key, START) is None
    assert backend.writes == []


async def test_rejected_child_makes_the_job_failed_until_it_is_accepted(backend):
    backend.errors = {"StatefulSet": UserError("spec.template is invalid")}
    await reconcile(backend, KEY, START)
    failed = conditions.find(backend.owner.status, "Failed")
    assert (failed.status, failed.reason) == ("True", "InvalidSpec")
    message = "spec.trainer.template: StatefulSet gsm8k-trainer was refused: spec.template is invalid"
    assert failed.message == message
    assert not {key.kind for key in backend.objects} & set(WORKLOAD_KINDS), "nothing holds a node"
    backend.errors = {}
    await reconcile(backend, KEY, START)
    assert backend.owner.status.phase == "Pending"
    assert ChildKey("StatefulSet", "gsm8k-trainer") in backend.objects


@pytest.mark.parametrize("error", [ForeignObjectError("taken"), UserError("too large")])
@OWNERS
async def test_no_workload_is_applied_while_a_child_that_pods_read_is_rejected(owner, key, error):
    backend = MemoryBackend(owner)
    backend.errors = {"ConfigMap": error}
    requeue_seconds = await reconcile(backend, key, START)
    assert not {child.kind for child in backend.objects} & set(WORKLOAD_KINDS)
    assert "taken" not in str(error) or requeue_seconds <= CONFLICT_RETRY_SECONDS, "no event reports its deletion"
    backend.writes.clear()
    backend.events.clear()
    await reconcile(backend, key, START)
    assert (backend.writes, backend.events) == ([], []), "reported once"
    backend.errors = {}
    await reconcile(backend, key, START)
    assert {child.kind for child in backend.objects} & set(WORKLOAD_KINDS)


async def test_name_conflict_of_a_reward_model_is_its_ready_condition():
    backend = MemoryBackend(make_model())
    backend.errors = {"ConfigMap": ForeignObjectError("taken")}
    await reconcile(backend, MODEL_KEY, START)
    ready = next(c for c in backend.owner.status.conditions if c.type == "Ready")
    message = "ConfigMap math-rewardmodel was refused: taken"
    assert (ready.status, ready.reason, ready.message) == ("False", "Refused", message)


@OWNERS
async def test_invalid_owner_gets_one_condition_with_every_problem(owner, key):
    backend = MemoryBackend(owner)

    async def get_owner(key):
        raise InvalidOwnerError(backend.owner, ["spec.model is missing", "spec.replicas must be at least 1"])

    backend.get_owner = get_owner
    for _ in range(2):
        assert await reconcile(backend, key, START) is None
    condition = next(c for c in backend.owner.status.conditions if c.reason == "InvalidSpec" and c.message)
    assert condition.message == "spec.model is missing; spec.replicas must be at least 1"
    assert (backend.writes, len(backend.events)) == (["status"], 1), "reported once"


@OWNERS
async def test_owner_with_unknown_fields_gets_an_event_and_no_write(owner, key):
    backend = MemoryBackend(owner)

    async def get_owner(key):
        raise UnknownFieldsError(backend.owner, "upgrade the operator")

    backend.get_owner = get_owner
    with pytest.raises(UnknownFieldsError):
        await reconcile(backend, key, START)
    assert backend.writes == []
    assert [(event.reason, event.message) for event in backend.events] == [("OutdatedOperator", "upgrade the operator")]


async def test_transient_error_is_raised_and_the_next_reconcile_completes(backend):
    backend.fail_at = 5
    with pytest.raises(TransientError):
        await reconcile(backend, KEY, START)
    await reconcile(backend, KEY, START)
    assert len(backend.objects) == NUM_CHILDREN


async def test_job_is_deleted_when_its_time_to_live_is_over(backend):
    backend.owner = make_job(ttlSecondsAfterFinished=0)
    await reconcile(backend, KEY, START)
    backend.objects[ChildKey("Job", "gsm8k-head")]["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    for _ in range(2):
        await reconcile(backend, KEY, START)
    assert backend.owner is None


@OWNERS
async def test_forbidden_write_is_reported_then_recovers(owner, key):
    backend = MemoryBackend(owner)
    backend.errors = {"Service": ForbiddenError("Service gsm8k-head: the namespace's quota is exceeded")}
    for _ in range(2):
        with pytest.raises(ForbiddenError):
            await reconcile(backend, key, START)
    assert {event.reason for event in backend.events} == {"Forbidden"}
    if key is KEY:
        running = conditions.find(backend.owner.status, conditions.RUNNING)
        assert (running.status, running.reason) == ("False", "Forbidden")
        assert "quota is exceeded" in running.message
        assert backend.writes.count("status") == 1, "once, however often it is retried"
    backend.errors = {}
    await reconcile(backend, key, START)
    assert {c.reason for c in backend.owner.status.conditions} >= {"WaitingForPods"}


def add_stuck_trainer(backend):
    labels = {"rljob.dev/job": "gsm8k", "rljob.dev/role": "trainer", "app.kubernetes.io/managed-by": "rljob-operator"}
    metadata = {"name": "gsm8k-trainer-0", "labels": labels, "deletionTimestamp": "2025-12-31T23:00:00Z"}
    owner = ChildKey("StatefulSet", "gsm8k-trainer")
    backend.pods["gsm8k-trainer-0"] = {"metadata": metadata, "spec": {"nodeName": "n1"}, "status": {}, "owner": owner}


async def test_pod_of_a_lost_node_is_deleted_by_force_with_an_event():
    backend = MemoryBackend(make_job(scheduling={"forceDeleteAfterSeconds": 10}))
    await reconcile(backend, KEY, START)
    add_stuck_trainer(backend)
    await reconcile(backend, KEY, START)
    (event,) = [event for event in backend.events if event.reason == "ForceDeleted"]
    assert "deleted Pod gsm8k-trainer-0 of node n1 by force" in event.message
    assert backend.pods == {}


@pytest.mark.parametrize("error", [ForbiddenError("RBAC: may not delete pods"), UserError("the webhook says no")])
async def test_refused_forced_deletion_is_in_the_status_and_stops_nothing_else(error):
    backend = MemoryBackend(make_job(scheduling={"forceDeleteAfterSeconds": 10}))
    add_stuck_trainer(backend)
    backend.errors = {"Pod": error}
    assert await reconcile(backend, KEY, START) <= CONFLICT_RETRY_SECONDS
    assert len(backend.objects) == NUM_CHILDREN, "everything else continues"
    message = conditions.find(backend.owner.status, conditions.RUNNING).message
    assert "Pod gsm8k-trainer-0 is stuck in Terminating on node n1" in message
    assert str(error) in message
    await reconcile(backend, KEY, START)
    await reconcile(backend, KEY, START)
    assert backend.writes.count("status") == 1, "once, however often it is retried"
    assert [event.reason for event in backend.events].count("Forbidden") == 1
    backend.errors = {}
    await reconcile(backend, KEY, START)
    assert str(error) not in conditions.find(backend.owner.status, conditions.RUNNING).message


async def test_forced_deletion_that_meets_a_conflict_is_retried_after_the_status():
    backend = MemoryBackend(make_job(scheduling={"forceDeleteAfterSeconds": 10}))
    add_stuck_trainer(backend)
    backend.errors = {"Pod": TransientError("409")}
    assert await reconcile(backend, KEY, START) <= CONFLICT_RETRY_SECONDS
    assert "is stuck in Terminating" in conditions.find(backend.owner.status, conditions.RUNNING).message
    assert "ForceDeleted" not in {event.reason for event in backend.events}


@OWNERS
async def test_defect_in_the_plan_is_in_the_status_until_it_is_repaired(owner, key, monkeypatch):
    backend = MemoryBackend(owner)
    plan = reconcile_module._plan

    def fail(*arguments):
        raise ValueError("cannot convert float NaN to integer")

    monkeypatch.setattr(reconcile_module, "_plan", fail)
    with pytest.raises(ValueError, match="NaN"):
        await reconcile(backend, key, START)
    failed = conditions.find(backend.owner.status, conditions.RECONCILE_FAILED)
    waiting = conditions.find(backend.owner.status, conditions.working_type(owner))
    assert (failed.reason, "ValueError: cannot convert float NaN" in waiting.message) == ("OperatorError", True)
    assert not failed.message, "once besides Reconciling"
    monkeypatch.setattr(reconcile_module, "_plan", plan)
    await reconcile(backend, key, START)
    assert conditions.find(backend.owner.status, conditions.RECONCILE_FAILED) is None


@OWNERS
@pytest.mark.parametrize(
    "error", [ForbiddenError("events are forbidden"), TransientError("503"), UserError("too long")]
)
async def test_event_that_cannot_be_recorded_does_not_stop_the_reconcile(owner, key, error):
    backend = MemoryBackend(owner)

    async def refuse(owner, event):
        raise error

    backend.record_event = refuse
    backend.errors = {"ConfigMap": UserError("too large")}
    await reconcile(backend, key, START)
    backend.errors = {}
    await reconcile(backend, key, START)
    assert workloads_of(backend)


async def test_end_of_a_job_stays_when_its_workloads_cannot_be_deleted(backend):
    await reconcile(backend, KEY, START)
    backend.objects[ChildKey("Job", "gsm8k-head")]["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    await reconcile(backend, KEY, START)

    async def refuse(namespace, child):
        raise ForbiddenError(f"RBAC does not allow the operator to delete {child.kind}")

    backend.delete = refuse
    with pytest.raises(ForbiddenError):
        await reconcile(backend, KEY, START)
    assert backend.owner.status.phase == "Succeeded"
    assert "delete" in conditions.find(backend.owner.status, conditions.RECONCILE_FAILED).message
    del backend.delete
    await reconcile(backend, KEY, START)
    assert conditions.find(backend.owner.status, conditions.RECONCILE_FAILED) is None
    assert backend.owner.status.phase == "Succeeded"


async def refuse_status(owner, status):
    raise UserError(".spec.trainer.compile: expected string, got false")


async def test_job_whose_status_is_refused_ends_all_the_same(backend):
    failures = FailureTracker()
    await reconcile(backend, KEY, START, failures=failures)
    running, backend.update_status = backend.owner.status, refuse_status
    backend.objects[ChildKey("Job", "gsm8k-head")]["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    for _ in range(2):
        with pytest.raises(UserError, match="expected string"):
            await reconcile(backend, KEY, START, failures=failures)
    assert workloads_of(backend) == ["gsm8k-head"], "the others held nodes"
    assert (backend.owner.status, list(failures.refused_statuses)) == (running, [KEY])
    del backend.update_status
    await reconcile(backend, KEY, START, failures=failures)
    assert (backend.owner.status.phase, failures.refused_statuses) == ("Succeeded", {})


async def test_refused_status_is_not_that_of_a_later_object_of_the_name(backend):
    failures = FailureTracker()
    backend.update_status = refuse_status
    with pytest.raises(UserError):
        await reconcile(backend, KEY, START, failures=failures)
    later = make_job()
    later.metadata.uid = "later"
    assert failures.with_refused_status(KEY, later) is later
    assert failures.with_refused_status(KEY, backend.owner).status.phase == "Pending"


async def test_unreadable_job_whose_head_has_ended_releases_its_pods(backend):
    await reconcile(backend, KEY, START)

    async def get_owner(key):
        raise InvalidOwnerError(backend.owner, ["spec.trainer.compile must be one of auto, always, never, got false"])

    backend.get_owner, backend.update_status = get_owner, refuse_status
    before = workloads_of(backend)
    with pytest.raises(UserError, match="expected string"):
        await reconcile(backend, KEY, START)
    assert workloads_of(backend) == before, "its head runs"
    assert "delete the object, correct the fields and apply it again" in backend.events[-1].message
    assert "spec.trainer.compile must be" in backend.events[-1].message
    backend.objects[ChildKey("Job", "gsm8k-head")]["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
    with pytest.raises(UserError):
        await reconcile(backend, KEY, START)
    assert workloads_of(backend) == ["gsm8k-head"]


class Operator(RuleBasedStateMachine):
    """Users, the cluster and faults act in any order: the job always converges, and its status is true."""

    def __init__(self):
        super().__init__()
        self.backend, self.now, self.settled, self.ended = MemoryBackend(make_job()), START, False, None

    @property
    def job(self):
        return self.backend.owner

    def change(self, **spec):
        manifest = self.job.model_dump(mode="json", by_alias=True)
        manifest["spec"] |= spec
        manifest["metadata"]["generation"] += 1
        self.backend.owner = RLJob.model_validate(manifest)
        self.settled = False

    def reconcile_once(self):
        return asyncio.run(reconcile(self.backend, KEY, self.now))

    @rule(replicas=st.integers(1, 5), steps=st.integers(1, 9))
    def scale(self, replicas, steps):
        rollout = self.job.spec.rollout.model_copy(update={"replicas": replicas})
        schedule = self.job.spec.schedule.model_copy(update={"steps": steps})
        dump = {"mode": "json", "by_alias": True}
        self.change(rollout=rollout.model_dump(**dump), schedule=schedule.model_dump(**dump))

    @rule(suspend=st.booleans())
    def suspend(self, suspend):
        self.change(suspend=suspend)

    @rule(names=st.sets(st.sampled_from(["correct", "style", "length"]), min_size=1), version=st.integers(0, 2))
    def choose_rewards(self, names, version):
        self.change(rewards=[reward(name, f"def f(): return {version}") for name in sorted(names)])

    @rule(broken=st.booleans())
    def break_or_fix_a_template(self, broken):
        head = self.job.spec.head.model_copy(update={"template": {"nonsense": 1} if broken else {}})
        self.change(head=head.model_dump(mode="json", by_alias=True))

    @precondition(lambda self: self.backend.objects)
    @rule(data=st.data())
    def delete_a_child(self, data):
        self.backend.remove(data.draw(st.sampled_from(sorted(self.backend.objects))))
        self.settled = False

    @precondition(lambda self: any(k.kind == "Deployment" for k in self.backend.objects))
    @rule(data=st.data())
    def tamper_with_a_deployment(self, data):
        key = data.draw(st.sampled_from(sorted(k for k in self.backend.objects if k.kind == "Deployment")))
        self.backend.objects[key]["spec"]["replicas"] = 77
        self.settled = False

    @rule(code=st.sampled_from([None, 1, 78]), role=st.sampled_from(["head", "trainer", "rollout"]))
    def start_or_crash_a_pod(self, code, role):
        kind = {"head": "Job", "trainer": "StatefulSet", "rollout": "Deployment"}[role]
        owner = ChildKey(kind, f"gsm8k-{role}")
        if owner not in self.backend.objects:
            return
        old = self.backend.pods.get(role, {}).get("status", {}).get("containerStatuses", [{"restartCount": 0}])[0]
        container = {"restartCount": old["restartCount"] + (code is not None), "state": {"running": {}}}
        if code is not None:
            container["lastState"] = {"terminated": {"exitCode": code}}
        status = {"conditions": [{"type": "Ready", "status": str(code is None)}], "containerStatuses": [container]}
        labels = {"rljob.dev/job": "gsm8k", "rljob.dev/role": role}
        self.backend.pods[role] = {"metadata": {"name": role, "labels": labels}, "status": status, "owner": owner}
        self.settled = False

    @precondition(lambda self: ChildKey("Job", "gsm8k-head") in self.backend.objects)
    @rule(how=st.sampled_from(["Complete", "Failed"]))
    def the_head_ends(self, how):
        head = self.backend.objects[ChildKey("Job", "gsm8k-head")]
        head["status"] = {"conditions": [{"type": how, "status": "True"}]}
        self.settled = False

    @rule(seconds=st.integers(1, 1000))
    def time_passes(self, seconds):
        self.now += timedelta(seconds=seconds)

    @rule(calls=st.integers(0, 25), after_write=st.booleans())
    def a_reconcile_is_interrupted(self, calls, after_write):
        self.backend.fail_at, self.backend.fail_after_write = calls, after_write
        with contextlib.suppress(TransientError):
            self.reconcile_once()
        self.backend.fail_at, self.settled = None, False

    @rule()
    def settle(self):
        for _ in range(6):
            self.backend.writes.clear()
            self.reconcile_once()
            if not self.backend.writes:
                break
        assert self.backend.writes == [], "it never becomes idle"
        self.settled = True
        self._check_children()

    def _check_children(self):
        status, kinds = self.job.status, {key.kind for key in self.backend.objects}
        assert status.observed_generation == self.job.metadata.generation
        others = {c.observed_generation for c in status.conditions if c.type != conditions.RUNNING}
        assert others == {self.job.metadata.generation}, "Running may have the one that runs"
        if conditions.is_finished(status) or status.phase == "Suspended":
            assert kinds.isdisjoint({"StatefulSet", "Deployment"})
        elif status.phase != "Failed":
            assert set(WORKLOAD_KINDS) <= kinds
            wanted = {reward.name for reward in self.job.spec.rewards}
            served = {k.name.removeprefix("gsm8k-reward-") for k in self.backend.objects if "-reward-" in k.name}
            assert served == wanted, "no orphan, and none missing"
            deployment = self.backend.objects[ChildKey("Deployment", "gsm8k-rollout")]
            assert deployment["spec"]["replicas"] == self.job.spec.rollout.replicas

    @invariant()
    def an_end_is_permanent(self):
        generation = self.job.metadata.generation
        if self.ended and self.ended.reason == USER_ERROR and self.ended.observed_generation < generation:
            self.ended = None  # a changed spec clears a user error
        if self.ended:
            assert conditions.find(self.job.status, self.ended.type).status == "True"
            assert self.job.status.completion_time is not None
        elif conditions.is_finished(self.job.status):
            self.ended = next(c for c in self.job.status.conditions if c.status == "True" and c.type != "Running")

    @invariant()
    def conditions_do_not_contradict_each_other(self):
        true = {c.type for c in self.job.status.conditions if c.status == "True"}
        assert not {"Succeeded", "Failed"} <= true
        assert not {"Suspended", "Running"} <= true
        assert not {"Restarting", "Running"} <= true


TestOperator = Operator.TestCase
