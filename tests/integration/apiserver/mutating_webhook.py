"""A mutating admission webhook as a policy engine runs it: an HTTPS server of this process, and its registration.

It serves one namespace. The test gives a function that changes an object; the webhook answers with the difference as a
JSON patch of whole top-level fields, as policy engines may.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import functools
import json
import ssl
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any

from aiohttp import web

from rljob_cluster.control_plane.control_plane import ControlPlane
from rljob_core.kube.client import ApiError
from tests.integration.apiserver.operator_harness import Manifest, OperatorHarness

_CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
WORKLOADS = {"batch": ("jobs",), "apps": ("statefulsets", "deployments")}
"""What policies for Pods are extended to: plural names by API group."""
Change = Callable[[Manifest], None]
"""Changes an object in place."""


@contextlib.asynccontextmanager
async def run_webhook(
    control_plane: ControlPlane,
    harness: OperatorHarness,
    change: Change,
    *,
    operations: Collection[str] = ("CREATE", "UPDATE"),
    resources: dict[str, tuple[str, ...]] = WORKLOADS,
) -> AsyncIterator[None]:
    """Change the objects of the harness's namespace in `operations`. Returns when the API server calls the webhook."""
    certificate, key = control_plane.pki.certificate("webhook", "webhook", hosts=[control_plane.address])
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    app = web.Application()
    app.router.add_post("/", functools.partial(_answer, change))
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, control_plane.address, 0, ssl_context=context)
    await site.start()
    path = f"{_CONFIGURATIONS}/{harness.namespace}"
    try:
        port = runner.addresses[0][1]
        body = _build_configuration(control_plane, harness.namespace, port, operations, resources)
        await harness.api.request("POST", _CONFIGURATIONS, body=body)
        await _until_called(harness)
        yield
    finally:
        with contextlib.suppress(ApiError):
            await harness.api.request("DELETE", path)
        await runner.cleanup()


def use_mirror(workload: Manifest) -> None:
    """Let the images of a workload's Pods come from another registry."""
    for container in _containers_of(workload):
        if not container["image"].startswith("mirror.example/"):
            container["image"] = f"mirror.example/{container['image']}"


def _containers_of(workload: Manifest) -> list[Manifest]:
    spec = workload["spec"]["template"]["spec"]
    return [*spec["containers"], *spec.get("initContainers", [])]


async def _answer(change: Change, request: web.Request) -> web.Response:
    review = (await request.json())["request"]
    old, new = review["object"], copy.deepcopy(review["object"])
    if new.get("kind") == "ConfigMap":
        new["data"] = {"called": "yes"}
    else:
        change(new)
    patch = [{"op": "replace", "path": f"/{name}", "value": new[name]} for name in new if new[name] != old[name]]
    answer: dict[str, Any] = {"uid": review["uid"], "allowed": True}
    if patch:
        answer |= {"patchType": "JSONPatch", "patch": base64.b64encode(json.dumps(patch).encode()).decode()}
    body = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": answer}
    return web.json_response(body)


def _build_configuration(
    plane: ControlPlane, namespace: str, port: int, operations: Collection[str], resources: dict[str, tuple[str, ...]]
) -> Manifest:
    def rule(group: str, plurals: Collection[str], operations: Collection[str]) -> Manifest:
        return {
            "apiGroups": [group],
            "apiVersions": ["*"],
            "operations": list(operations),
            "resources": list(plurals),
        }

    probe = {"matchLabels": {"webhook-probe": "yes"}}
    client = {
        "url": f"https://{plane.address}:{port}/",
        "caBundle": base64.b64encode(plane.pki.ca.read_bytes()).decode(),
    }
    common = {
        "clientConfig": client,
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
    }
    rules = [rule(group, plurals, operations) for group, plurals in resources.items()]
    called = rule("", ["configmaps"], ["CREATE"])
    hooks = [
        common | {"name": "probe.example.com", "rules": [called], "objectSelector": probe},
        common | {"name": "change.example.com", "rules": rules},
    ]
    return {"metadata": {"name": namespace}, "webhooks": hooks}


async def _until_called(harness: OperatorHarness) -> None:
    """Admission reads its configuration through informers."""
    body = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "webhook-probe", "labels": {"webhook-probe": "yes"}},
        "data": {"called": "no"},
    }

    async def is_called() -> bool:
        answer = await harness.api.request("POST", harness.path("ConfigMap"), query={"dryRun": "All"}, body=body)
        return bool(answer["data"]["called"] == "yes")

    await harness.until("the webhook", is_called)
