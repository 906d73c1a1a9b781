"""The reconciler of the operator: objects that were deleted with their namespace, and its metrics."""

from datetime import UTC, datetime

import pytest

from rljob_operator.backend import JobKey, RewardModelKey
from rljob_operator.defaults import DEFAULTS
from rljob_operator.kube.backend import KubernetesBackend
from rljob_operator.kube.cache import Cache
from rljob_operator.kube.client import ApiError, NamespaceGoneError
from rljob_operator.loop.health import Health
from rljob_operator.loop.metrics import Metrics
from rljob_operator.loop.workqueue import WorkQueue
from rljob_operator.operator import Reconciler

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
