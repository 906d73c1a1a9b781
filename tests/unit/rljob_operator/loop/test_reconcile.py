"""Reconcile over a little API server in memory, that fails, forgets and is tampered with at will."""

import asyncio
import contextlib
import copy
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rljob_api.errors import TransientError, UserError
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.status import RLJobStatus
from rljob_operator.backend import ChildKey, JobKey, Observed, key_of
from rljob_operator.children import WORKLOAD_KINDS
from rljob_operator.loop.reconcile import ForbiddenError, InvalidJobError, reconcile
from rljob_operator.plan import conditions
from rljob_operator.plan.lifecycle import USER_ERROR

KEY = JobKey("default", "gsm8k")
START = datetime(2026, 1, 1, tzinfo=UTC)
NUM_CHILDREN = 19


def make_job(**spec):
    return RLJob.model_validate(
        {
            "metadata": {"name": "gsm8k", "uid": "u1", "generation": 1},
            "spec": {
                "model": {"source": "/models/tiny"},
                "data": {"train": {"source": "/data/train.jsonl"}},
                "rewards": [reward("correct")],
            }
            | spec,
        }
    )


def reward(name, source="def reward(): ..."):
    return {"name": name, "function": {"inline": source}, "resources": {"requests": {"cpu": "0.5"}}}


class MemoryBackend:
    """Server-side apply for one manager, immutable fields, defaults, owner references, and calls that fail."""

    def __init__(self, job):
        self.job, self.objects, self.applied, self.pods = job, {}, {}, {}
        self.events, self.writes, self.version = [], [], 0
        self.fail_at, self.fail_after_write, self.refuses = None, False, set()

    async def get_job(self, key):
        self._call()
        return self.job.model_copy(deep=True) if self.job and key == KEY else None

    async def observe(self, job):
        self._call()
        return Observed(copy.deepcopy(self.objects), tuple(copy.deepcopy(list(self.pods.values()))))

    async def apply(self, manifest):
        key = key_of(manifest)
        with self._write(f"apply {key.kind} {key.name}"):
            old = self.objects.get(key)
            new = _merged(_without(old or {}, self.applied.get(key, {}), manifest), manifest)
            self._admit(key, old, new)
            self.applied[key], self.objects[key] = copy.deepcopy(manifest), _defaulted(new)
            if self.objects[key] != old:
                self.version += 1

    async def delete(self, namespace, child):
        with self._write(f"delete {child.kind} {child.name}"):
            self.remove(child)

    async def delete_job(self, key):
        with self._write("delete the job"):
            self.job = None

    async def update_status(self, job, status):
        with self._write("status"):
            assert job.metadata.uid == self.job.metadata.uid
            self.job = self.job.model_copy(update={"status": RLJobStatus.model_validate(status.to_manifest())})

    async def record_event(self, job, event):
        self.events.append(event)

    def remove(self, child):
        self.objects.pop(child, None)
        self.applied.pop(child, None)
        self.pods = {name: pod for name, pod in self.pods.items() if pod["owner"] != child}

    def _admit(self, key, old, new):
        if key.kind in self.refuses:
            raise UserError(f"{key.kind} is forbidden: exceeded quota")
        if old and key.kind == "Job" and old["spec"]["template"] != new["spec"]["template"]:
            raise UserError("spec.template: field is immutable")
        if old and key.kind == "Secret" and old["data"] != new["data"]:
            raise UserError("data: field is immutable when `immutable` is set")
        if sum(ref.get("controller", False) for ref in new["metadata"]["ownerReferences"]) > 1:
            raise UserError("Only one reference can have Controller set to true")

    def _call(self):
        if self.fail_at is not None:
            self.fail_at -= 1
            if self.fail_at < 0:
                self.fail_at = None
                raise TransientError("the API server is away")

    def _write(self, what):
        backend = self

        class Write:
            """Fails before or after the write took place: the operator cannot know which."""

            def __enter__(self):
                self.lost = False
                try:
                    backend._call()
                except TransientError:
                    if not backend.fail_after_write:
                        raise
                    self.lost = True

            def __exit__(self, kind, value, traceback):
                if kind is None:
                    backend.writes.append(what)
                    if self.lost:
                        raise TransientError("the answer was lost")

        return Write()


def _merged(old, new):
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {name: _merged(old.get(name), value) for name, value in new.items()}
    return copy.deepcopy(new)


def _without(old, before, now):
    """What this manager applied before and no longer does goes away."""
    if not isinstance(old, dict) or not isinstance(before, dict):
        return old
    gone = set(before) - set(now)
    return {n: _without(v, before.get(n), now.get(n, {})) for n, v in old.items() if n not in gone}


def _defaulted(manifest):
    """Some of what an API server adds, and how it writes quantities."""
    manifest = copy.deepcopy(manifest)
    manifest["metadata"].setdefault("creationTimestamp", "2026-01-01T00:00:00Z")
    for container in manifest.get("spec", {}).get("template", {}).get("spec", {}).get("containers", []):
        container.setdefault("imagePullPolicy", "IfNotPresent")
        container.get("resources", {}).get("requests", {}).update({"cpu": "500m"} if container["resources"] else {})
    if not manifest.get("spec", {}).get("egress", True):
        del manifest["spec"]["egress"]
    return manifest


@pytest.fixture
def backend():
    return MemoryBackend(make_job())


async def test_a_new_job_gets_all_children_and_a_second_look_writes_nothing(backend):
    await reconcile(backend, KEY, START)
    assert len(backend.objects) == NUM_CHILDREN
    assert backend.writes[-1] == "status", "one status write, at the end"
    backend.writes.clear()
    await reconcile(backend, KEY, START + timedelta(seconds=10))
    assert backend.writes == []


async def test_a_deleted_child_comes_back_and_a_changed_one_is_put_right(backend):
    await reconcile(backend, KEY, START)
    del backend.objects[ChildKey("Service", "gsm8k-rollout")]
    backend.objects[ChildKey("Deployment", "gsm8k-rollout")]["spec"]["replicas"] = 7
    backend.writes.clear()
    await reconcile(backend, KEY, START)
    assert backend.writes == ["apply Service gsm8k-rollout", "apply Deployment gsm8k-rollout"]
    assert backend.objects[ChildKey("Deployment", "gsm8k-rollout")]["spec"]["replicas"] == 1


async def test_what_the_spec_no_longer_says_leaves_the_child(backend):
    backend.job = make_job(rollout={"nodePool": {"nodeSelector": {"pool": "a"}}})
    await reconcile(backend, KEY, START)
    backend.job = make_job().model_copy(update={"status": backend.job.status})
    await reconcile(backend, KEY, START)
    assert "nodeSelector" not in backend.objects[ChildKey("Deployment", "gsm8k-rollout")]["spec"]["template"]["spec"]


async def test_what_others_add_to_a_child_stays_and_causes_no_write(backend):
    await reconcile(backend, KEY, START)
    backend.objects[ChildKey("Deployment", "gsm8k-rollout")]["metadata"]["annotations"]["other"] = "tool"
    backend.writes.clear()
    await reconcile(backend, KEY, START)
    assert backend.writes == []


async def test_a_job_that_is_gone_needs_nothing(backend):
    backend.job = None
    assert await reconcile(backend, KEY, START) is None
    assert backend.writes == []


async def test_a_child_that_the_api_server_refuses_is_told_in_the_status_and_heals(backend):
    backend.refuses = {"StatefulSet"}
    await reconcile(backend, KEY, START)
    failed = conditions.find(backend.job.status, "Failed")
    assert (failed.status, failed.reason) == ("True", "InvalidSpec")
    assert failed.message == "StatefulSet gsm8k-trainer was refused: StatefulSet is forbidden: exceeded quota"
    backend.refuses = set()
    await reconcile(backend, KEY, START)
    assert backend.job.status.phase == "Pending"
    assert ChildKey("StatefulSet", "gsm8k-trainer") in backend.objects


async def test_an_object_that_is_no_job_gets_a_failed_condition_with_every_problem(backend):
    async def get_job(key):
        raise InvalidJobError(backend.job, ["spec.model is missing", "spec.rolout is unknown; did you mean rollout?"])

    backend.get_job = get_job
    for _ in range(2):
        await reconcile(backend, KEY, START)
    failed = conditions.find(backend.job.status, "Failed")
    assert failed.message == "spec.model is missing; spec.rolout is unknown; did you mean rollout?"
    assert (backend.writes, len(backend.events)) == (["status"], 1), "said once"


async def test_the_api_server_away_is_the_callers_to_retry(backend):
    backend.fail_at = 5
    with pytest.raises(TransientError):
        await reconcile(backend, KEY, START)
    await reconcile(backend, KEY, START)
    assert len(backend.objects) == NUM_CHILDREN


async def test_a_job_is_deleted_when_its_time_to_live_is_over(backend):
    backend.job = make_job(ttlSecondsAfterFinished=0)
    await reconcile(backend, KEY, START)
    backend.objects[ChildKey("Job", "gsm8k-head")]["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    for _ in range(2):
        await reconcile(backend, KEY, START)
    assert backend.job is None


class Operator(RuleBasedStateMachine):
    """Users, the cluster and bad luck act in any order. However that goes, it converges and says what is so."""

    def __init__(self):
        super().__init__()
        self.backend, self.now, self.settled, self.ended = MemoryBackend(make_job()), START, False, None

    @property
    def job(self):
        return self.backend.job

    def change(self, **spec):
        manifest = self.job.model_dump(mode="json", by_alias=True)
        manifest["spec"] |= spec
        manifest["metadata"]["generation"] += 1
        self.backend.job = RLJob.model_validate(manifest)
        self.settled = False

    def look(self):
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
    def break_or_mend_a_template(self, broken):
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
    def a_look_is_cut_short(self, calls, after_write):
        self.backend.fail_at, self.backend.fail_after_write = calls, after_write
        with contextlib.suppress(TransientError):
            self.look()
        self.backend.fail_at, self.settled = None, False

    @rule()
    def settle(self):
        for _ in range(6):
            self.backend.writes.clear()
            self.look()
            if not self.backend.writes:
                break
        assert self.backend.writes == [], "it never comes to rest"
        self.settled = True
        self._check_children()

    def _check_children(self):
        status, kinds = self.job.status, {key.kind for key in self.backend.objects}
        assert status.observed_generation == self.job.metadata.generation
        assert {c.observed_generation for c in status.conditions} == {self.job.metadata.generation}
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
    def an_end_is_for_ever(self):
        generation = self.job.metadata.generation
        if self.ended and self.ended.reason == USER_ERROR and self.ended.observed_generation < generation:
            self.ended = None  # a changed spec undoes a mistake of the user's
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
TestOperator.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


async def test_what_the_operator_may_not_do_is_told_in_a_condition_and_an_event_and_recovers():
    backend, allowed = MemoryBackend(make_job()), MemoryBackend.apply

    async def apply(manifest):
        if manifest["kind"] == "Service":
            raise ForbiddenError("Service gsm8k-head: the namespace's quota is used up")
        await allowed(backend, manifest)

    backend.apply = apply
    for _ in range(2):
        with pytest.raises(ForbiddenError):
            await reconcile(backend, KEY, START)
    running = conditions.find(backend.job.status, conditions.RUNNING)
    assert (running.status, running.reason) == ("False", "Forbidden")
    assert "quota is used up" in running.message
    assert backend.writes.count("status") == 1, "once, however often it is tried"
    assert {event.reason for event in backend.events} == {"Forbidden"}
    del backend.apply
    await reconcile(backend, KEY, START)
    assert conditions.find(backend.job.status, conditions.RUNNING).reason == "WaitingForPods"
