"""A namespace that goes with all that is in it, of which no watch has told."""

from datetime import UTC, datetime

import pytest

from rljob_operator.defaults import DEFAULTS
from rljob_operator.kube.backend import KubernetesBackend
from rljob_operator.kube.cache import Cache
from rljob_operator.kube.client import ApiError, NamespaceGoneError
from rljob_operator.kube.idle import Resting
from rljob_operator.kube.operator import look
from rljob_operator.loop.workqueue import JobKey, RewardModelKey

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
    """An API server without the namespace; of what was in it, it has `left`."""

    def __init__(self, left=None):
        self.left, self.asked = left, []

    async def request(self, method, path, **_):
        self.asked.append(method)
        if method == "GET" and self.left:
            return self.left
        what = 'namespaces "ns" not found' if method != "GET" else '"a" not found'
        raise ApiError(404, "NotFound", what)


class Driver:
    async def ask(self, driver, max_age_seconds=0.0):
        return None


def make_backend(kind, api):
    cache = Cache()
    cache.upsert(kind, make_owner(kind))
    return KubernetesBackend(api, cache, Driver(), keys=None)


@pytest.mark.parametrize("kind", SPECS)
async def test_what_went_with_its_namespace_is_forgotten_at_the_first_try(kind):
    api = Api()
    backend = make_backend(kind, api)
    assert await look(backend, Resting(backend), KEYS[kind], NOW, DEFAULTS) is None
    assert backend.cache.get(kind, "ns", "a") is None
    api.asked.clear()
    assert await look(backend, Resting(backend), KEYS[kind], NOW, DEFAULTS) is None
    assert api.asked == [], "nothing is tried again"


@pytest.mark.parametrize("kind", SPECS)
async def test_what_is_still_there_is_tried_again(kind):
    backend = make_backend(kind, Api(left=make_owner(kind)))
    with pytest.raises(NamespaceGoneError, match="its namespace is gone"):
        await look(backend, Resting(backend), KEYS[kind], NOW, DEFAULTS)
    assert backend.cache.get(kind, "ns", "a") is not None
