"""The operator's start with CRDs that are older or newer, and the measures of a reconcile."""

import asyncio
import contextlib
import copy
import time
from datetime import UTC, datetime

import aiohttp
import pytest

from rljob_api.errors import TransientError
from rljob_core.backend import RewardModelKey
from rljob_core.defaults import DEFAULTS
from rljob_core.kube.client import ApiError
from rljob_core.loop.workqueue import WorkQueue
from rljob_operator import operator
from rljob_operator.health import Health
from rljob_operator.kube.backend import KubernetesBackend
from rljob_operator.kube.cache import Cache
from rljob_operator.metrics import OperatorMetrics
from rljob_operator.operator import build_reconcile, run_operator
from rljob_operator.settings import Settings
from tests.paths import ROOT
from tests.support import fast_yaml
from tests.support.waiting import DEADLINE_SECONDS


class CrdApi:
    """An API server that serves `crds`, and nothing else."""

    def __init__(self):
        self.crds, self.requests, self.observers = {}, [], []

    def separate(self, max_connections):
        return self

    async def close(self):
        pass

    async def request(self, method, path, **_):
        self.requests.append((method, path))
        name = path.rpartition("/")[2]
        if name in self.crds:
            return self.crds[name]
        raise ApiError(404, "NotFound", f'"{name}" not found')

    async def list_pages(self, resource, namespace):
        self.requests.append(("LIST", resource.plural))
        raise TransientError("no answer")
        yield


async def test_operator_waits_for_matching_crds_and_reports_the_difference(monkeypatch, caplog, unused_tcp_port):
    monkeypatch.setattr(operator, "_CRD_RETRY_SECONDS", 0.1)
    api, url = CrdApi(), f"http://127.0.0.1:{unused_tcp_port}/readyz"
    settings = Settings(lease=False, metrics_port=0, health_port=unused_tcp_port)

    async def wait_for(text):
        async with asyncio.timeout(DEADLINE_SECONDS), aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(url) as answer:
                        if answer.status == 503 and text in await answer.text():
                            return
                await asyncio.sleep(0.02)  # polling

    running = asyncio.create_task(run_operator(settings, api=api))
    await wait_for('CRD rljobs.rljob.dev: "rljobs.rljob.dev" not found; upgrade the CRDs')
    current = {path.stem: fast_yaml.load(path.read_text()) for path in (ROOT / "crds").glob("*.yaml")}
    api.crds = copy.deepcopy(current)
    spec = api.crds["rljobs.rljob.dev"]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    del api.crds["rljobs.rljob.dev"]["metadata"]["annotations"]  # with its version, it would be tolerated
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


async def test_failed_reconcile_is_counted_and_no_longer_running():
    cache, health = Cache(), Health(WorkQueue(), OperatorMetrics())
    metadata = {"name": "a", "namespace": "ns", "uid": "u", "resourceVersion": "7", "generation": 1}
    spec = {"function": {"inline": "def compute_score(data_source, solution_str, ground_truth): return 1.0\n"}}
    model = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RewardModel", "metadata": metadata, "spec": spec}
    cache.upsert("RewardModel", model)
    reconcile = build_reconcile(KubernetesBackend(CrdApi(), cache, None), health, DEFAULTS, time.monotonic)
    with pytest.raises(TransientError, match="not found"):
        await reconcile(RewardModelKey("ns", "a"), datetime(2026, 1, 1, tzinfo=UTC))
    assert health._started_at == {}
    errors = {"reason": "TransientError"}
    assert health.metrics.registry.get_sample_value("rljob_operator_errors_total", errors) == 1
