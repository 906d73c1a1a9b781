"""Any template that is YAML gives a job with all its workloads, or a message that names the template and no workload.

Reconciles of the real backend against a real API server, without informers: the cache holds what the backend writes.
Half of the examples switch off the checks of Pod templates, as on a cluster whose version differs from theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rljob_api.errors import TransientError
from rljob_core.backend import JobKey, Key, RewardModelKey, utc_now
from rljob_core.children import WORKLOAD_KINDS
from rljob_core.kube.client import ApiError, KubeApi, connect
from rljob_core.kube.resources import BY_KIND, REWARD_MODEL, RLJOB
from rljob_core.loop.failures import FailureTracker
from rljob_core.loop.reconcile import reconcile
from rljob_core.plan import validate
from rljob_operator.kube.backend import KubernetesBackend
from rljob_operator.kube.cache import Cache
from rljob_operator.kube.driver import DriverClient
from tests.integration.apiserver.manifests import put, smallest
from tests.support.any_template import DEEP, templates

ROLES = {
    "head": "spec.head",
    "trainer": "spec.trainer",
    "rollout": "spec.rollout",
    "rewards.0": "spec.rewards[0]",
    "": "spec",
}
"""Where the template is, and its path in messages. "": of a RewardModel."""
_NUM_RECONCILES = 3


class Cluster:
    """Reconciles one owner at a time in a namespace of a real API server."""

    def __init__(self, api: KubeApi, namespace: str, loop: asyncio.AbstractEventLoop) -> None:
        self.api, self.namespace, self.loop, self._numbers = api, namespace, loop, itertools.count()

    def run(self, role: str, template: Any) -> tuple[str, list[str]]:
        """Return the messages of the status, and the existing workloads. Raises ApiError if the owner is refused."""
        return self.loop.run_until_complete(self._run(role, template))

    async def _run(self, role: str, template: Any) -> tuple[str, list[str]]:
        resource = RLJOB if role else REWARD_MODEL
        name = f"any-{next(self._numbers)}"
        body = put(smallest(resource.kind, name), f"{role}.template".lstrip("."), template)
        stored = await self.api.request("POST", resource.path(self.namespace), body=body)
        cache, driver = Cache(), DriverClient()
        backend, failures = KubernetesBackend(self.api, cache, driver), FailureTracker()
        cache.upsert(resource.kind, stored)
        key: Key = JobKey(self.namespace, name) if role else RewardModelKey(self.namespace, name)
        for _ in range(_NUM_RECONCILES):
            with contextlib.suppress(TransientError):
                await reconcile(backend, key, utc_now(), failures=failures)
        await driver.close()
        found = await self.api.request("GET", resource.path(self.namespace, name))
        messages = [c["message"] for c in found["status"]["conditions"] if c["type"] in _REPORTING]
        return "\n".join(messages), await self._workloads(name)

    async def _workloads(self, owner: str) -> list[str]:
        found = []
        for kind in WORKLOAD_KINDS:
            items = (await self.api.request("GET", BY_KIND[kind].path(self.namespace)))["items"]
            found += [f"{kind} {item['metadata']['name']}" for item in items if _owner_of(item) == owner]
        return found


_TOO_LARGE = "bytes as a ConfigMap, at most"
_REPORTING = ("Failed", "ReconcileFailed", "Ready", "Running")


def _owner_of(item: dict[str, Any]) -> str:
    return next((str(ref["name"]) for ref in item["metadata"].get("ownerReferences") or []), "")


@pytest.fixture
def cluster(control_plane, namespace):
    loop = asyncio.new_event_loop()
    api = loop.run_until_complete(connect(str(control_plane.kubeconfig)))
    yield Cluster(api, namespace, loop)
    loop.run_until_complete(api.close())
    loop.close()


def test_any_template_gives_all_workloads_or_a_message_and_none(cluster):
    outcomes = []

    @given(role=st.sampled_from(list(ROLES)), template=templates(), is_checked=st.booleans())
    @example(role="trainer", template={"spec": DEEP}, is_checked=False)
    @example(role="head", template={"spec": {"nodeSelectr": {"a": "b"}}}, is_checked=False)
    @example(role="", template={"spec": {"nodeSelector": ["a"]}}, is_checked=False)
    @example(role="rewards.0", template={"spec": {"volumes": [{"name": "v"}, {"name": "v"}]}}, is_checked=False)
    @example(role="rollout", template={"metadata": {"annotations": {"a": "x" * 1_100_000}}}, is_checked=True)
    @example(role="rollout", template={"metadata": {"annotations": {"a": "\U0001f600\x7f"}}}, is_checked=True)
    @example(role="head", template={"spec": {"priorityClassName": "none"}}, is_checked=True)
    def check(role: str, template: Any, is_checked: bool) -> None:
        checks = (
            contextlib.nullcontext() if is_checked else mock.patch.object(validate, "find_pod_problems", _find_none)
        )
        with checks:
            try:
                messages, workloads = cluster.run(role, template)
            except ApiError:  # as kubectl reports it
                outcomes.append("refused as a whole")
                return
        if len(workloads) == (4 if role else 1):
            outcomes.append("accepted")
            return
        outcomes.append("refused")
        assert workloads == [], "all or none"
        assert f"{ROLES[role]}.template" in messages or _TOO_LARGE in messages, messages

    check()
    assert {"accepted", "refused"} <= set(outcomes), "both happen"


def _find_none(children: Any, roles: Any) -> tuple[()]:
    return ()
