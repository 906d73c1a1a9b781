"""Demand of a shared RewardModel: gathered from the drivers of all jobs that refer to it, and who wakes it."""

import asyncio
import base64

import pytest

from rljob_api.wire.protocol import DriverStatus, RewardDemand
from rljob_operator.backend import JobKey
from rljob_operator.kube.backend import KubernetesBackend
from rljob_operator.kube.cache import Cache
from rljob_operator.kube.driver import Driver, DriverClient
from rljob_operator.kube.informer import Feed
from rljob_operator.kube.resources import REWARD_MODEL, RLJOB
from rljob_operator.loop.workqueue import RewardModelKey
from rljob_operator.plan.autoscale import POLL_SECONDS, Demand
from rljob_operator.plan.job import POLL_SECONDS as PROGRESS_SECONDS

SCORE = {"function": {"inline": "def score(sample):\n    return 1.0\n"}}
BURST = RewardDemand(samples=640, expected=640, is_open=True)
SCALED = {"autoscaling": {"maxReplicas": 8}}


class Drivers:
    """What each job's driver says, by its address."""

    def __init__(self):
        self.said, self.ages = {}, []

    async def ask(self, driver, max_age_seconds):
        self.ages.append(max_age_seconds)
        return self.said.get(driver.address) if driver else None


class Stage:
    def __init__(self):
        self.cache, self.drivers, self.version = Cache(), Drivers(), 100
        self.backend = KubernetesBackend(None, self.cache, self.drivers, keys=None)

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
        model = await self.backend.get_reward_model(JobKey("ns", "math"))
        return (await self.backend.observe_reward_model(model)).demands


async def test_every_job_of_the_namespace_that_refers_to_it_counts_and_no_other():
    stage = Stage()
    for number, (name, model, namespace) in enumerate(
        [("a", "math", "ns"), ("b", "math", "ns"), ("c", "other", "ns"), ("d", "math", "elsewhere")]
    ):
        stage.store_job(name, model, namespace)
        if namespace == "ns":
            stage.start_head(name, f"10.0.0.{number}")
            stage.drivers.said[f"10.0.0.{number}"] = DriverStatus(demand={"correct": BURST})
    assert await stage.demands(**SCALED) == (Demand("a/correct", BURST), Demand("b/correct", BURST))
    assert set(stage.drivers.ages) == {POLL_SECONDS}, "before the burst"


async def test_a_driver_that_is_silent_is_unknown_and_a_job_without_a_head_asks_for_nothing():
    stage = Stage()
    stage.store_job("a")
    stage.store_job("b")
    stage.start_head("a", "10.0.0.1")
    assert await stage.demands(**SCALED) == (Demand("a/correct", None),)


async def test_a_model_with_a_fixed_number_is_content_with_what_drivers_last_said():
    stage = Stage()
    stage.store_job("a")
    stage.start_head("a", "10.0.0.1")
    stage.drivers.said["10.0.0.1"] = DriverStatus(demand={"correct": BURST})
    assert await stage.demands() == (Demand("a/correct", BURST),)
    assert stage.drivers.ages == [PROGRESS_SECONDS]


@pytest.mark.parametrize("spec", [SCALED, {}])
async def test_a_change_of_a_job_wakes_the_models_that_it_names(spec):
    stage = Stage()
    feed = Feed(None, stage.cache, (), 600)
    stage.store(REWARD_MODEL.kind, "math", spec=SCORE | spec)
    stage.store(REWARD_MODEL.kind, "other", spec=SCORE | SCALED)
    job = stage.store_job("a")
    job["metadata"] = job["metadata"] | {"resourceVersion": "900"}
    feed.take_in(RLJOB.kind, {"type": "MODIFIED", "object": job})
    keys = [feed._changed.get_nowait() for _ in range(feed._changed.qsize())]
    assert keys == [JobKey("ns", "a"), RewardModelKey("ns", "math")]


async def test_a_driver_is_asked_again_only_when_its_words_are_too_old_for_the_asker():
    clock, client, asked = [0.0], DriverClient(clock=lambda: clock[0]), []

    async def get(driver):
        await asyncio.sleep(0)
        asked.append(clock[0])
        return DriverStatus(step=len(asked))

    client._get = get
    driver = Driver("uid", "10.0.0.1", "t")
    for now, age in ((0.0, 10.0), (2.0, 10.0), (2.0, 2.0), (3.0, 2.0), (9.0, 10.0), (9.0, 2.0)):
        clock[0] = now
        await client.ask(driver, age)
    assert asked == [0.0, 2.0, 9.0]
