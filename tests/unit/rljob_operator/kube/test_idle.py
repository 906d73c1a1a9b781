"""A job at rest is not looked at; whatever could make a look do anything ends its rest."""

from datetime import UTC, datetime, timedelta

import pytest

from rljob_api.wire.protocol import DriverStatus, RewardDemand
from rljob_operator.backend import JobKey
from rljob_operator.children.common import WORKLOAD_KINDS
from rljob_operator.defaults import DEFAULTS
from rljob_operator.kube.backend import KubernetesBackend
from rljob_operator.kube.cache import Cache, OwnerKey
from rljob_operator.kube.idle import MAX_REST_SECONDS, Resting
from rljob_operator.kube.resources import EVENT, RLJOB
from rljob_operator.plan.job import POLL_SECONDS

KEY = JobKey("ns", "gsm8k")
OWNER = OwnerKey(RLJOB.kind, *KEY)
NOW = datetime(2026, 1, 1, tzinfo=UTC)
SCORE = {"function": {"inline": "def score(sample):\n    return 1.0\n"}}


class Api:
    """Stores what is applied, as the API server would, and counts the writes."""

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
    said = None
    num_asked = 0

    async def ask(self, driver, max_age_seconds=POLL_SECONDS):
        self.num_asked += 1
        return self.said if driver else None


class Stage:
    """One job, its cache, and hands to change what is seen."""

    def __init__(self, **spec):
        self.api, self.cache, self.driver = Api(), Cache(), Driver()
        self.backend = KubernetesBackend(self.api, self.cache, self.driver, keys=None)
        self.resting, self.num_looks = Resting(self.backend), 0
        observe = self.backend.observe

        async def counted(job):
            self.num_looks += 1
            return await observe(job)

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
        """The same object, seen in a newer version."""
        found = next(o for o in self.cache.owned(OWNER) if o["kind"] == kind)
        content = {name: value for name, value in found.items() if name not in ("apiVersion", "kind", "metadata")}
        self.store(kind, {**found["metadata"], "resourceVersion": str(self.api.version + 1)}, **content)

    def start_head(self):
        head = next(o for o in self.cache.owned(OWNER) if o["kind"] == "Job")["spec"]["template"]
        metadata = head["metadata"] | {"name": "gsm8k-head-x", "uid": "pod"}
        self.store("Pod", metadata, spec=head["spec"], status={"phase": "Running", "podIP": "10.0.0.1"})

    async def look(self, seconds=0.0):
        """Whether the job was looked at, and when it is to be again."""
        before = self.num_looks
        again = await self.resting.reconcile(KEY, NOW + timedelta(seconds=seconds), DEFAULTS)
        return self.num_looks > before, again

    async def settle(self):
        for _ in range(4):
            await self.look()
        self.api.num_writes = 0
        assert (await self.look())[0] is False, "it is at rest"
        return self


async def test_a_job_at_rest_is_not_looked_at_and_nothing_is_written():
    stage = await Stage().settle()
    stage.start_head()
    await stage.settle()
    for seconds in range(0, 200, 10):
        assert await stage.look(seconds) == (False, POLL_SECONDS)
    assert stage.api.num_writes == 0
    assert stage.driver.num_asked >= 20, "its driver is asked all the same"


async def test_a_job_without_a_driver_is_not_even_polled():
    stage = await Stage().settle()
    looked, again = await stage.look()
    assert not looked
    assert POLL_SECONDS < again <= MAX_REST_SECONDS


async def test_no_rest_lasts_for_ever():
    stage = await Stage().settle()
    assert (await stage.look(MAX_REST_SECONDS))[0]


@pytest.mark.parametrize("kind", [RLJOB.kind, "Secret", "ConfigMap", *WORKLOAD_KINDS, "Pod"])
async def test_a_change_of_anything_of_the_job_ends_its_rest(kind):
    stage = await Stage().settle()
    stage.start_head()
    await stage.settle()
    if kind == RLJOB.kind:
        job = stage.api.objects[RLJOB.path(*KEY)]
        stage.store(kind, {**job["metadata"], "resourceVersion": str(stage.api.version + 1)}, spec=job["spec"])
    else:
        stage.touch(kind)
    assert (await stage.look())[0]


async def test_a_child_that_went_is_made_again_at_once():
    stage = await Stage().settle()
    stage.cache.forget("Service", KEY.namespace, "gsm8k-head")
    assert (await stage.look())[0]
    assert stage.api.num_writes == 1


async def test_a_warning_about_a_child_ends_the_rest():
    stage = await Stage().settle()
    about = {"kind": "Job", "namespace": KEY.namespace, "name": "gsm8k-head"}
    stage.store(EVENT.kind, {"name": "why"}, involvedObject=about, reason="FailedCreate", message="no")
    assert (await stage.look())[0]


async def test_another_answer_of_the_driver_ends_the_rest():
    stage = await Stage().settle()
    stage.start_head()
    stage.driver.said = DriverStatus(step=1)
    await stage.settle()
    stage.driver.said = DriverStatus(step=2)
    assert (await stage.look())[0]
    assert stage.api.objects[RLJOB.path(*KEY)]["status"]["progress"]["step"] == 2


async def test_a_driver_whose_demand_alone_moves_lets_it_rest():
    stage = await Stage().settle()
    stage.start_head()
    stage.driver.said = DriverStatus(step=1)
    await stage.settle()
    for seconds in range(1, 5):
        stage.driver.said = DriverStatus(step=1, demand={"correct": RewardDemand(elapsed_seconds=seconds)})
        assert not (await stage.look(seconds))[0]


async def test_a_reward_model_that_comes_or_goes_ends_the_rest_of_who_names_it():
    stage = await Stage(rewards=[{"name": "correct", "rewardModelRef": {"name": "judge"}}]).settle()
    stage.store("RewardModel", {"name": "judge", "uid": "m", "generation": 1}, spec=SCORE)
    assert (await stage.look())[0]
    await stage.settle()
    stage.cache.forget("RewardModel", KEY.namespace, "judge")
    assert (await stage.look())[0]


async def test_a_deadline_is_kept_though_nothing_changes():
    stage = await Stage(activeDeadlineSeconds=60).settle()
    _, again = await stage.look(10)
    assert again == 50
    assert (await stage.look(60))[0]
    assert stage.api.objects[RLJOB.path(*KEY)]["status"]["phase"] == "Failed"


async def test_a_gang_that_waits_gives_its_nodes_back_in_time():
    stage = await Stage(scheduling={"gang": "gates", "timeoutSeconds": 60}).settle()
    assert (await stage.look(30))[0] is False
    assert (await stage.look(60))[0]
    assert stage.api.objects[RLJOB.path(*KEY)]["status"]["notBefore"]


async def test_an_autoscaled_job_never_rests():
    scaled = {"name": "correct", "autoscaling": {"minReplicas": 1, "maxReplicas": 4}} | SCORE
    stage = Stage(rewards=[scaled])
    for _ in range(4):
        assert (await stage.look())[0], "what it wants depends on the time"
