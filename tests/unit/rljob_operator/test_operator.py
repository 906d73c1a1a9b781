"""The operator: its start with other CRDs, and objects that were deleted with their namespace."""

import asyncio
import contextlib
import copy
from datetime import UTC, datetime

import aiohttp
import pytest
import yaml

from rljob_api.errors import TransientError
from rljob_operator import operator
from rljob_operator.backend import JobKey, RewardModelKey
from rljob_operator.defaults import DEFAULTS
from rljob_operator.kube.backend import KubernetesBackend
from rljob_operator.kube.cache import Cache
from rljob_operator.kube.client import ApiError, NamespaceGoneError
from rljob_operator.loop.health import Health
from rljob_operator.loop.metrics import Metrics
from rljob_operator.loop.workqueue import WorkQueue
from rljob_operator.operator import Reconciler, run_operator
from rljob_operator.settings import Settings
from tests.paths import ROOT

NOW = datetime(2026, 1, 1, tzinfo=UTC)
FUNCTION = {"inline": "def compute_score(data_source, solution_str, ground_truth): return 1.0\n"}
SPECS = {
    "RLJob": {
        "model": {"source": "/m"},
        "data": {"train": {"source": "/d"}},
        "rewards": [{"name": "r", "function": FUNCTION}],
    },
    "RewardModel": {"function": FUNCTION},
}
KEYS = {"RLJob": JobKey("ns", "a"), "RewardModel": RewardModelKey("ns", "a")}


def make_owner(kind):
    metadata = {"name": "a", "namespace": "ns", "uid": "u", "resourceVersion": "7", "generation": 1}
    return {"apiVersion": "rljob.dev/v1alpha1", "kind": kind, "metadata": metadata, "spec": SPECS[kind]}


class Api:
    """An API server without the namespace, except for the object `left`."""

    def __init__(self, left=None):
        self.left, self.methods = left, []

    async def request(self, method, path, **_):
        self.methods.append(method)
        if method == "GET" and self.left:
            return self.left
        what = 'namespaces "ns" not found' if method != "GET" else '"a" not found'
        raise ApiError(404, "NotFound", what)


class Driver:
    async def get_status(self, driver, max_age_seconds=0.0):
        return None


def make_reconciler(kind, api):
    cache = Cache()
    cache.upsert(kind, make_owner(kind))
    health = Health(WorkQueue(), Metrics())
    return Reconciler(KubernetesBackend(api, cache, Driver()), health, DEFAULTS), cache, health


def num_errors(health):
    samples = [s for family in health.metrics.registry.collect() for s in family.samples]
    return {s.labels["reason"]: s.value for s in samples if s.name == "rljob_operator_errors_total"}


@pytest.mark.parametrize("kind", SPECS)
async def test_owner_that_was_deleted_with_its_namespace_is_forgotten(kind):
    api = Api()
    reconciler, cache, health = make_reconciler(kind, api)
    assert await reconciler.reconcile(KEYS[kind], NOW) is None
    assert cache.get(kind, "ns", "a") is None
    api.methods.clear()
    assert await reconciler.reconcile(KEYS[kind], NOW) is None
    assert api.methods == [], "nothing is retried"
    assert num_errors(health) == {}
    assert health.started_at == {}


@pytest.mark.parametrize("kind", SPECS)
async def test_owner_that_still_exists_is_retried(kind):
    reconciler, cache, health = make_reconciler(kind, Api(left=make_owner(kind)))
    with pytest.raises(NamespaceGoneError, match="its namespace was deleted"):
        await reconciler.reconcile(KEYS[kind], NOW)
    assert cache.get(kind, "ns", "a") is not None
    assert num_errors(health) == {"NamespaceGoneError": 1}


class CrdApi:
    """An API server that serves `crds`, and nothing else."""

    def __init__(self):
        self.crds, self.requests = {}, []

    async def request(self, method, path, **_):
        self.requests.append((method, path))
        name = path.rpartition("/")[2]
        if name in self.crds:
            return self.crds[name]
        raise ApiError(404, "NotFound", f'"{name}" not found')

    async def list(self, resource, namespace):
        self.requests.append(("LIST", resource.plural))
        raise TransientError("no answer")


async def test_operator_waits_for_matching_crds_and_reports_the_difference(monkeypatch, caplog, unused_tcp_port):
    monkeypatch.setattr(operator, "_CRD_RETRY_SECONDS", 0.1)
    api, url = CrdApi(), f"http://127.0.0.1:{unused_tcp_port}/readyz"
    settings = Settings(lease=False, metrics_port=0, health_port=unused_tcp_port)

    async def wait_for(text):
        async with asyncio.timeout(20), aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(url) as answer:
                        if answer.status == 503 and text in await answer.text():
                            return
                await asyncio.sleep(0.02)  # polling

    running = asyncio.create_task(run_operator(settings, api=api))
    await wait_for('CRD rljobs.rljob.dev: "rljobs.rljob.dev" not found; upgrade the CRDs')
    current = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / "crds").glob("*.yaml")}
    api.crds = copy.deepcopy(current)
    spec = api.crds["rljobs.rljob.dev"]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    scheduling = spec["properties"].pop("scheduling")
    await wait_for("is older than this operator: it lacks spec.scheduling; upgrade the CRDs")
    spec["properties"] |= {"scheduling": scheduling, "later": {"type": "string"}}
    await wait_for("is newer than this operator, which does not know spec.later; upgrade the operator")
    assert "does not know spec.later" in caplog.text
    assert all(method == "GET" for method, _ in api.requests), "nothing is listed or written"
    api.crds = current
    await wait_for("listing every kind for the first time")
    running.cancel()
    await asyncio.wait([running])
