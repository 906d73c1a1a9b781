"""An idle job is not reconciled; whatever could make a reconcile write ends its idle state."""

from datetime import UTC, datetime, timedelta

import pytest

from rljob_api.wire.driver_status import DriverStatus, HungPart, Outage, RewardDemand
from rljob_core.backend import PROGRESS_POLL_SECONDS, DriverAnswer, JobKey
from rljob_core.children.common import WORKLOAD_KINDS
from rljob_core.kube.resources import EVENT, POLICY, RLJOB
from rljob_core.loop.reconcile import reconcile
from rljob_operator.kube.backend import KubernetesBackend
from rljob_operator.kube.cache import Cache, ObjectKey
from rljob_operator.kube.driver_request import DriverEndpoint
from rljob_operator.kube.idle import MAX_IDLE_SECONDS, IdleTracker

KEY = JobKey("ns", "gsm8k")
OWNER = ObjectKey(RLJOB.kind, *KEY)
NOW = datetime(2026, 1, 1, tzinfo=UTC)
SCORE = {"function": {"inline": "def score(sample):\n    return 1.0\n"}}


class Api:
    """Stores what is applied, as the API server does, and counts the writes."""

    def __init__(self):
        self.version, self.num_writes, self.objects = 100, 0, {}

    async def request(self, method, path, *, query=None, body=None, content_type=""):
        self.num_writes += 1
        if method == "DELETE":
            return {}
        if body["kind"] == EVENT.kind:
            return body
        self.version += 1
        path = path.removesuffix("/status")
        old = self.objects.get(path, {})
        metadata = {"uid": f"uid-{self.version}"} | old.get("metadata", {}) | body["metadata"]
        metadata["resourceVersion"] = str(self.version)
        self.objects[path] = {**old, **body, "metadata": metadata}
        return self.objects[path]


class Driver:
    status = None
    num_requests = 0

    async def get_status(self, driver, key, max_age_seconds=PROGRESS_POLL_SECONDS):
        self.num_requests += 1
        return DriverAnswer(self.status) if driver else DriverAnswer()


class OperatorHarness:
    """One job in a cache, with methods to change what is observed."""

    def __init__(self, **spec):
        self.api, self.cache, self.driver = Api(), Cache(), Driver()
        self.seconds = 0.0
        self.backend = KubernetesBackend(self.api, self.cache, self.driver, clock=lambda: self.seconds)
        self.idle, self.num_reconciles = IdleTracker(self.backend), 0
        observe = self.backend.observe

        async def counted(owner):
            self.num_reconciles += 1
            return await observe(owner)

        self.backend.observe = counted
        whole = {
            "model": {"source": "/models/tiny"},
            "data": {"train": {"source": "/data/train.jsonl"}},
            "rewards": [{"name": "correct"} | SCORE],
        }
        self.store(RLJOB.kind, {"name": KEY.name, "uid": "u", "generation": 1}, spec=whole | spec)

    def store(self, kind, metadata, **content):
        self.api.version += 1
        metadata = {"namespace": KEY.namespace, "resourceVersion": str(self.api.version), **metadata}
        manifest = {"apiVersion": "rljob.dev/v1alpha1", "kind": kind, "metadata": metadata, **content}
        if kind == RLJOB.kind:
            self.api.objects[RLJOB.path(*KEY)] = manifest
        self.cache.upsert(kind, manifest)

    def touch(self, kind):
        """Store the same object in a newer version."""
        found = next(o for o in self.cache.owned(OWNER) if o["kind"] == kind)
        content = {name: value for name, value in found.items() if name not in ("apiVersion", "kind", "metadata")}
        self.store(kind, {**found["metadata"], "resourceVersion": str(self.api.version + 1)}, **content)

    def start_head(self):
        head = next(o for o in self.cache.owned(OWNER) if o["kind"] == "Job")["spec"]["template"]
        metadata = head["metadata"] | {"name": "gsm8k-head-x", "uid": "pod"}
        self.store("Pod", metadata, spec=head["spec"], status={"phase": "Running", "podIP": "10.0.0.1"})

    def start_pods(self):
        """One ready Pod of each workload."""
        ready = [{"type": "Ready", "status": "True"}]
        for workload in (o for o in self.cache.owned(OWNER) if o["kind"] in WORKLOAD_KINDS):
            template, name = workload["spec"]["template"], f"{workload['metadata']['name']}-0"
            metadata = template["metadata"] | {"name": name, "uid": name}
            status = {"phase": "Running", "podIP": "10.0.0.1", "conditions": ready}
            self.store("Pod", metadata, spec=template["spec"], status=status)

    async def step(self, seconds=0.0):
        """Return whether the job was reconciled, and after which time to requeue it."""
        self.seconds = max(self.seconds, seconds)
        before, now = self.num_reconciles, NOW + timedelta(seconds=seconds)
        requeue_after = await self.idle.idle_seconds(KEY, now)
        if requeue_after is None:
            requeue_after = await reconcile(self.backend, KEY, now, on_unchanged=self.idle.track(KEY, now))
        return self.num_reconciles > before, requeue_after

    async def settle(self):
        for _ in range(4):
            await self.step()
        self.api.num_writes = 0
        assert (await self.step())[0] is False, "it is idle"
        return self


async def test_idle_job_is_not_reconciled_and_nothing_is_written():
    harness = await OperatorHarness().settle()
    harness.start_head()
    await harness.settle()
    for seconds in range(0, 200, 10):
        assert await harness.step(seconds) == (False, PROGRESS_POLL_SECONDS)
    assert harness.api.num_writes == 0
    assert harness.driver.num_requests >= 20, "its driver is still polled"


async def test_idle_job_without_driver_is_not_polled():
    harness = await OperatorHarness().settle()
    was_reconciled, requeue_after = await harness.step()
    assert not was_reconciled
    assert PROGRESS_POLL_SECONDS < requeue_after <= MAX_IDLE_SECONDS


async def test_policy_of_the_namespace_ends_the_idle_state():
    harness = await OperatorHarness().settle()
    harness.store(POLICY.kind, {"name": "default"}, spec={"limits": {"gpus": 0}})
    assert (await harness.step())[0]
    await harness.settle()
    harness.cache.remove(POLICY.kind, {"metadata": harness.cache.get(POLICY.kind, "ns", "default")["metadata"]})
    assert (await harness.step())[0]


async def test_policy_of_another_namespace_does_not():
    harness = await OperatorHarness().settle()
    harness.store(POLICY.kind, {"name": "default", "namespace": "other"}, spec={"limits": {"gpus": 0}})
    assert not (await harness.step())[0]


async def test_idle_state_ends_after_a_maximum_time():
    harness = await OperatorHarness().settle()
    assert (await harness.step(MAX_IDLE_SECONDS))[0]


@pytest.mark.parametrize("kind", [RLJOB.kind, "Secret", "ConfigMap", *WORKLOAD_KINDS, "Pod"])
async def test_change_of_any_object_of_the_job_ends_its_idle_state(kind):
    harness = await OperatorHarness().settle()
    harness.start_head()
    await harness.settle()
    if kind == RLJOB.kind:
        job = harness.api.objects[RLJOB.path(*KEY)]
        harness.store(kind, {**job["metadata"], "resourceVersion": str(harness.api.version + 1)}, spec=job["spec"])
    else:
        harness.touch(kind)
    assert (await harness.step())[0]


async def test_deleted_child_is_recreated_immediately():
    harness = await OperatorHarness().settle()
    harness.cache.forget("Service", KEY.namespace, "gsm8k-head")
    assert (await harness.step())[0]
    assert harness.api.num_writes == 1


async def test_warning_about_a_child_ends_the_idle_state():
    harness = await OperatorHarness().settle()
    involved = {"kind": "Job", "namespace": KEY.namespace, "name": "gsm8k-head"}
    harness.store(EVENT.kind, {"name": "why"}, involvedObject=involved, reason="FailedCreate", message="no")
    assert (await harness.step())[0]


async def test_changed_driver_status_ends_the_idle_state():
    harness = await OperatorHarness().settle()
    harness.start_head()
    harness.driver.status = DriverStatus(step=1)
    await harness.settle()
    harness.driver.status = DriverStatus(step=2)
    assert (await harness.step(PROGRESS_POLL_SECONDS))[0]
    assert harness.api.objects[RLJOB.path(*KEY)]["status"]["progress"]["step"] == 2


async def test_job_that_trains_next_to_many_others_is_idle_between_two_reports():
    harness = await OperatorHarness().settle()
    harness.start_head()
    harness.driver.status = DriverStatus(step=1)
    await harness.settle()
    for number in range(400):
        await harness.backend.get_driver_answer(DriverEndpoint(f"{number}", "", ""), JobKey("ns", f"{number}"))
    written = []
    for poll in range(1, 61):
        harness.driver.status = DriverStatus(step=1 + poll, waits_for=f"{poll} of 64 samples")
        for number in range(400):
            await harness.backend.get_driver_answer(DriverEndpoint(f"{number}", "", ""), JobKey("ns", f"{number}"))
        harness.api.num_writes = 0
        await harness.step(poll * PROGRESS_POLL_SECONDS)
        written.append(harness.api.num_writes)
    assert 12 <= sum(written) <= 20, "10 minutes, a report each 40 s"
    progress = harness.api.objects[RLJOB.path(*KEY)]["status"]["progress"]
    assert progress["step"] >= 61 - 4


async def test_changed_demand_alone_keeps_the_idle_state():
    harness = await OperatorHarness().settle()
    harness.start_head()
    harness.driver.status = DriverStatus(step=1)
    await harness.settle()
    for seconds in range(1, 5):
        harness.driver.status = DriverStatus(step=1, demand={"correct": RewardDemand(elapsed_seconds=seconds)})
        assert not (await harness.step(seconds))[0]


async def test_created_or_deleted_reward_model_ends_the_idle_state_of_its_jobs():
    harness = await OperatorHarness(rewards=[{"name": "correct", "rewardModelRef": {"name": "judge"}}]).settle()
    harness.store("RewardModel", {"name": "judge", "uid": "m", "generation": 1}, spec=SCORE)
    assert (await harness.step())[0]
    await harness.settle()
    harness.cache.forget("RewardModel", KEY.namespace, "judge")
    assert (await harness.step())[0]


async def test_deadline_of_a_running_job_is_enforced_though_nothing_changes():
    harness = await OperatorHarness(activeDeadlineSeconds=60).settle()
    assert (await harness.step(60))[0] is False, "it does not run yet"
    harness.start_pods()
    await harness.settle()
    assert (await harness.step(59))[0] is False
    assert (await harness.step(60))[0]
    assert harness.api.objects[RLJOB.path(*KEY)]["status"]["phase"] == "Failed"


async def test_incomplete_gang_releases_its_nodes_in_time():
    harness = await OperatorHarness(scheduling={"gang": "gates", "timeoutSeconds": 60}).settle()
    assert (await harness.step(30))[0] is False
    assert (await harness.step(60))[0]
    assert harness.api.objects[RLJOB.path(*KEY)]["status"]["notBefore"]


async def test_autoscaled_job_is_never_idle():
    scaled = {"name": "correct", "autoscaling": {"minReplicas": 1, "maxReplicas": 4}} | SCORE
    harness = OperatorHarness(rewards=[scaled])
    for _ in range(4):
        assert (await harness.step())[0], "its demand depends on the time"


async def test_job_that_stops_making_steps_is_idle_until_its_deadline():
    """Times that pass are no reason to reconcile: the plan says when they are."""
    harness = await OperatorHarness(progressDeadlineSeconds=60).settle()
    harness.start_pods()
    part, outage = {"role": "trainer", "name": "rank 3", "limit_seconds": 9}, {"what": "a judge", "limit_seconds": 9}

    def report(seconds, **more):
        harness.driver.status = DriverStatus(
            step=1, since_step_seconds=seconds, training_share=1 / (1 + seconds), **more
        )

    report(0)
    await harness.settle()
    for seconds in range(10, 60, 10):
        report(seconds)
        assert not (await harness.step(seconds))[0]
    report(60)
    assert (await harness.step(60))[0]
    conditions = harness.api.objects[RLJOB.path(*KEY)]["status"]["conditions"]
    assert next(c["reason"] for c in conditions if c["type"] == "Progressing") == "ProgressDeadlineExceeded"
    writes = []
    for seconds in range(70, 110, 10):
        named = {"hung": [HungPart(**part, seconds=seconds)], "outages": [Outage(**outage, seconds=seconds)]}
        report(seconds, **named)
        harness.api.num_writes = 0
        await harness.step(seconds)
        writes.append(harness.api.num_writes)
    assert writes == [2, 0, 0, 0], "who hangs is in the status and an event at once, and once"
    assert not (await harness.step(110))[0]
