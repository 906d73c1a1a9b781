"""Demand of a shared RewardModel: collected from the drivers of all jobs that reference it."""

import base64

import pytest

from rljob_api.errors import TransientError, UserError
from rljob_api.wire.driver_status import DriverStatus, RewardDemand
from rljob_core.backend import (
    DEMAND_POLL_SECONDS,
    PROGRESS_POLL_SECONDS,
    Demand,
    DriverAnswer,
    InvalidOwnerError,
    JobKey,
    RewardModelKey,
    StartJob,
)
from rljob_core.kube.client import ApiError
from rljob_core.kube.resources import REWARD_MODEL, RLJOB
from rljob_operator.kube.backend import KubernetesBackend
from rljob_operator.kube.cache import Cache

SCORE = {"function": {"inline": "def score(sample):\n    return 1.0\n"}}
BURST = RewardDemand(samples=640, expected=640, is_open=True)
SCALED = {"autoscaling": {"maxReplicas": 8}}


class Drivers:
    """The status of each job's driver, by its address."""

    def __init__(self):
        self.statuses, self.ages = {}, []

    async def get_status(self, driver, key, max_age_seconds):
        self.ages.append(max_age_seconds)
        return DriverAnswer(self.statuses.get(driver.address)) if driver else DriverAnswer()


class BackendHarness:
    def __init__(self):
        self.cache, self.drivers, self.version = Cache(), Drivers(), 100
        self.backend = KubernetesBackend(None, self.cache, self.drivers)

    def store(self, kind, name, namespace="ns", *, api="rljob.dev/v1alpha1", owner=None, **content):
        self.version += 1
        metadata = {"name": name, "namespace": namespace, "uid": f"uid-{name}", "resourceVersion": str(self.version)}
        if owner:
            reference = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "name": owner, "uid": f"uid-{owner}"}
            labels = {"rljob.dev/job": owner, "rljob.dev/role": "head"}
            metadata |= {"ownerReferences": [reference | {"controller": True}], "labels": labels}
        manifest = {"apiVersion": api, "kind": kind, "metadata": metadata, **content}
        self.cache.upsert(kind, manifest)
        return manifest

    def store_job(self, name, model="math", namespace="ns"):
        rewards = [{"name": "correct", "rewardModelRef": {"name": model}}]
        spec = {"model": {"source": "/m"}, "data": {"train": {"source": "/d"}}, "rewards": rewards}
        return self.store(RLJOB.kind, name, namespace, spec=spec)

    def start_head(self, name, address):
        token = base64.b64encode(b"t").decode()
        self.store("Secret", f"{name}-token", api="v1", owner=name, data={"token": token})
        status = {"phase": "Running", "podIP": address}
        self.store("Pod", f"{name}-head-x", api="v1", owner=name, spec={}, status=status)

    async def demands(self, **spec):
        self.store(REWARD_MODEL.kind, "math", spec=SCORE | spec)
        model = await self.backend.get_owner(RewardModelKey("ns", "math"))
        return (await self.backend.observe(model)).demands


async def test_demand_comes_from_the_jobs_of_the_namespace_that_reference_the_model():
    harness = BackendHarness()
    for number, (name, model, namespace) in enumerate(
        [("a", "math", "ns"), ("b", "math", "ns"), ("c", "other", "ns"), ("d", "math", "elsewhere")]
    ):
        harness.store_job(name, model, namespace)
        if namespace == "ns":
            harness.start_head(name, f"10.0.0.{number}")
            harness.drivers.statuses[f"10.0.0.{number}"] = DriverStatus(demand={"correct": BURST})
    assert await harness.demands(**SCALED) == (Demand("a/correct", BURST), Demand("b/correct", BURST))
    assert set(harness.drivers.ages) == {DEMAND_POLL_SECONDS}, "before the burst"


async def test_job_sees_the_job_from_whose_model_it_starts():
    harness = BackendHarness()
    harness.store(RLJOB.kind, "sums", "elsewhere", spec={})
    manifest = harness.store_job("longer")
    spec = manifest["spec"] | {"model": {"source": "job://sums@20"}}
    harness.store(RLJOB.kind, "longer", spec=spec)
    job = await harness.backend.get_owner(JobKey("ns", "longer"))
    assert (await harness.backend.observe(job)).start_job is None, "another namespace's is not meant"
    checkpoint = {"persistentVolumeClaim": {"claimName": "runs"}, "export": "every"}
    harness.store(RLJOB.kind, "sums", spec={"checkpoint": checkpoint})
    assert (await harness.backend.observe(job)).start_job == StartJob("runs", exports="every")


async def test_demand_is_unknown_when_driver_is_silent_and_zero_without_head():
    harness = BackendHarness()
    harness.store_job("a")
    harness.store_job("b")
    harness.start_head("a", "10.0.0.1")
    assert await harness.demands(**SCALED) == (Demand("a/correct", None),)


async def test_model_of_fixed_size_uses_older_driver_answers():
    harness = BackendHarness()
    harness.store_job("a")
    harness.start_head("a", "10.0.0.1")
    harness.drivers.statuses["10.0.0.1"] = DriverStatus(demand={"correct": BURST})
    assert await harness.demands() == (Demand("a/correct", BURST),)
    assert harness.drivers.ages == [PROGRESS_POLL_SECONDS]


async def test_an_object_with_a_field_of_newer_crds_stops_no_other_one():
    harness = BackendHarness()
    harness.store_job("a")
    newer = {"mood": "grim", **harness.cache.get(RLJOB.kind, "ns", "a")["spec"]}
    harness.store(RLJOB.kind, "newer", spec=newer)
    harness.start_head("a", "10.0.0.1")
    assert await harness.demands(**SCALED) == (Demand("a/correct", None),)
    harness.store(REWARD_MODEL.kind, "math", spec={**SCORE, "mood": "grim"})
    job = await harness.backend.get_owner(JobKey("ns", "a"))
    assert (await harness.backend.observe(job)).reward_models == {}


async def test_objects_are_reported_when_they_are_read_also_invalid_and_deleted_ones():
    harness, read = BackendHarness(), []
    harness.backend = KubernetesBackend(None, harness.cache, harness.drivers, on_read=lambda *seen: read.append(seen))
    harness.store_job("a")
    valid = await harness.backend.get_owner(JobKey("ns", "a"))
    harness.store(RLJOB.kind, "b", spec={"model": {"source": "/m"}}, status={"phase": "Failed"})
    with pytest.raises(InvalidOwnerError):
        await harness.backend.get_owner(JobKey("ns", "b"))
    assert await harness.backend.get_owner(JobKey("ns", "c")) is None
    assert [key.name for key, _ in read] == ["a", "b", "c"]
    assert [owner and owner.status.phase for _, owner in read] == [valid.status.phase, "Failed", None]


async def test_cluster_without_the_kind_of_a_feature_is_a_user_error_with_what_to_install():
    async def refuse(*arguments, **options):
        raise ApiError(404, "NotFound", "the server could not find the requested resource")

    backend = KubernetesBackend(None, Cache(), Drivers())
    backend._apply = refuse
    pool = {"apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxWarmPool"}
    with pytest.raises(UserError, match=r"has no SandboxWarmPool .* install kubernetes-sigs/agent-sandbox"):
        await backend.apply(pool | {"metadata": {"name": "gsm8k-agent-code", "namespace": "ns"}})


async def test_binding_whose_role_does_not_exist_yet_is_tried_again():
    async def refuse(*arguments, **options):
        raise ApiError(404, "NotFound", 'roles.rbac.authorization.k8s.io "gsm8k-agent-code" not found')

    backend = KubernetesBackend(None, Cache(), Drivers())
    backend._apply = refuse
    binding = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding"}
    with pytest.raises(TransientError, match="not found"):
        await backend.apply(binding | {"metadata": {"name": "gsm8k-agent-code", "namespace": "ns"}})
