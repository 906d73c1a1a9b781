"""Admission webhooks of one namespace that never answer, on a real API server: jobs of other namespaces do not wait."""

from __future__ import annotations

import asyncio
import base64
import itertools
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from rljob_core.kube.client import MAX_CONNECTIONS, ApiError
from rljob_core.kube.resources import BY_KIND, RLJOB
from tests.integration.apiserver.manifests import smallest
from tests.integration.apiserver.operator_harness import OperatorHarness

NUM_SLOW = 20
WORKLOADS = ("Job", "StatefulSet", "Deployment")
CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
RESOURCES = {
    "": ["services", "configmaps", "secrets"],
    "networking.k8s.io": ["networkpolicies"],
    "policy": ["poddisruptionbudgets"],
    "apps": ["deployments", "statefulsets"],
    "batch": ["jobs"],
}


class InFlight:
    """The writes of the operator in one namespace that have no answer yet."""

    def __init__(self, namespace: str) -> None:
        self._part = f"/namespaces/{namespace}/"
        self.requests = dict[int, str]()
        """Paths by number: a retry is another request."""
        self._numbers = itertools.count(1)

    async def hook(self, request: aiohttp.ClientRequest) -> None:
        if request.method == "PATCH" and self._part in request.url.path:
            self.requests[next(self._numbers)] = request.url.path

    def observe(self, verb: str, path: str, code: int) -> None:
        if verb == "PATCH" and (number := next((n for n, sent in self.requests.items() if sent == path), None)):
            del self.requests[number]


@pytest.fixture
async def hanging_webhook(control_plane: Any, harness: OperatorHarness) -> AsyncIterator[None]:
    """All children of jobs in the harness's namespace wait half a minute for a server that accepts connections only."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    server = await asyncio.start_server(accept, control_plane.address, 0)
    host, port = server.sockets[0].getsockname()
    common = {
        "clientConfig": {
            "url": f"https://{host}:{port}/",
            "caBundle": base64.b64encode(control_plane.pki.ca.read_bytes()).decode(),
        },
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": harness.namespace}},
    }

    def build_rules(resources: dict[str, list[str]]) -> list[dict[str, Any]]:
        operations = {"apiVersions": ["*"], "operations": ["CREATE", "UPDATE"]}
        return [operations | {"apiGroups": [group], "resources": plurals} for group, plurals in resources.items()]

    probe = {"name": "probe.example.com", "timeoutSeconds": 1, "rules": build_rules({"": ["podtemplates"]})}
    hangs = {"name": "hangs.example.com", "timeoutSeconds": 30, "rules": build_rules(RESOURCES)}
    body = {"metadata": {"name": harness.namespace}, "webhooks": [common | probe, common | hangs]}
    await harness.api.request("POST", CONFIGURATIONS, body=body)

    async def is_called() -> bool:
        template = {"metadata": {"name": "probe"}, "template": {"spec": {"containers": [{"name": "a", "image": "a"}]}}}
        path = f"/api/v1/namespaces/{harness.namespace}/podtemplates"
        try:
            await harness.api.request("POST", path, query={"dryRun": "All"}, body=template)
        except ApiError as error:
            return "failed calling webhook" in error.message
        return False

    try:
        await harness.until("the webhook", is_called)
        yield
    finally:
        await harness.api.request("DELETE", f"{CONFIGURATIONS}/{harness.namespace}")
        await harness.stop()
        server.close()


@pytest.mark.usefixtures("hanging_webhook")
async def test_job_gets_its_children_while_those_of_another_namespace_hang(
    harness: OperatorHarness,
) -> None:
    fast = f"{harness.namespace}-fast"
    await harness.api.request("POST", "/api/v1/namespaces", body={"metadata": {"name": fast}})
    account = {"metadata": {"name": "default"}}
    await harness.api.request("POST", f"/api/v1/namespaces/{fast}/serviceaccounts", body=account)
    hanging = InFlight(harness.namespace)
    await harness.start(hanging.hook, namespaces=(harness.namespace, fast))
    harness.apis[0].observers.append(hanging.observe)
    for number in range(NUM_SLOW):
        await harness.create(smallest(name=f"slow-{number}"))

    async def hang_all() -> bool:
        return len(hanging.requests) >= MAX_CONNECTIONS

    await harness.until("writes in all connections of the slow namespace", hang_all)
    before = set(hanging.requests)
    await harness.api.request("POST", RLJOB.path(fast), body=smallest())

    async def has_workloads() -> bool:
        found = [(await harness.api.request("GET", BY_KIND[kind].path(fast)))["items"] for kind in WORKLOADS]
        return sum(map(len, found)) == 4

    try:
        await harness.until("the workloads of the fast job", has_workloads)
        assert before & hanging.requests.keys(), "the fast job waited for none of the slow namespace's answers"
        assert len(hanging.requests) <= MAX_CONNECTIONS, "a namespace has at most half of the connections"
    finally:
        await harness.api.request("DELETE", RLJOB.path(fast), body={"propagationPolicy": "Background"})
