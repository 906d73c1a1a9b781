"""Sandboxes of a tool on a real API server with the CRDs of agent-sandbox, from its Go module.

What the operator writes is accepted, and the account of a tool may do what its workers do and nothing else. No
controller runs: the test binds the claim.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob_service.worker.code.agent_sandbox import ClaimError, Claims, build_name
from tests.paths import ROOT
from tests.support import fast_yaml
from tests.support.agent_sandbox import find_crds, open_api

CODE = "code-agent-own"
KINDS = ("Secret", "ServiceAccount", "Role", "RoleBinding", "NetworkPolicy", "SandboxTemplate", "SandboxWarmPool")
GROUP = "/apis/extensions.agents.x-k8s.io/v1beta1"


@pytest.fixture(scope="module")
def agent_sandbox(control_plane: Any) -> Iterator[None]:
    """The CRDs, for the tests of this module."""
    paths = [f"--filename={path}" for path in find_crds()]
    control_plane.kubectl("create", *paths)
    control_plane.kubectl("wait", "crd", "--all", "--for=condition=Established", "--timeout=60s")
    yield
    control_plane.kubectl("delete", *paths)


def build_children(namespace: str) -> list[dict[str, Any]]:
    """What the golden files have for one tool, without an owner."""
    documents = fast_yaml.load_all((ROOT / "tests/data/plan/sandbox/children.yaml").read_text())
    children = [d for d in documents if d and d["kind"] in KINDS and d["metadata"]["name"].startswith(CODE)]
    for child in children:
        del child["metadata"]["ownerReferences"]
        child["metadata"]["namespace"] = namespace
        for subject in child.get("subjects", []):
            subject["namespace"] = namespace
    return children


def test_manifests_are_accepted_and_workers_claim_with_the_account_of_their_tool(
    control_plane: Any, namespace: str, agent_sandbox: None, tmp_path: Path
) -> None:
    control_plane.kubectl("apply", "--server-side", "-f", "-", input=yaml.safe_dump_all(build_children(namespace)))
    template = json.loads(control_plane.kubectl("get", "sandboxtemplate", CODE, "-n", namespace, "-o", "json"))
    (container,) = template["spec"]["podTemplate"]["spec"]["containers"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready", "no field was pruned"
    api = open_api(control_plane, namespace, CODE, tmp_path)
    claims, name = Claims(api, api.namespace, CODE, 60), build_name(CODE, "episode")
    with pytest.raises(ClaimError, match="the claim has no status yet"):
        claims.get_address("episode", 0)
    bind(control_plane, namespace, name)
    assert claims.get_address("episode", 5) == "10.1.2.3"
    others = (
        f"/api/v1/namespaces/{namespace}/secrets",
        f"{GROUP}/namespaces/{namespace}/sandboxclaims",
        f"{GROUP}/namespaces/{namespace}/sandboxwarmpools/other",
    )
    assert [api.request("GET", path)[0] for path in others] == [403, 403, 403]
    claims.delete("episode")
    assert api.request("GET", f"{GROUP}/namespaces/{namespace}/sandboxclaims/{name}")[0] == 404


def bind(plane: Any, namespace: str, claim: str) -> None:
    """As the controller does."""
    ready = {"type": "Ready", "status": "True", "reason": "Ready", "message": ""}
    ready["lastTransitionTime"] = "2026-01-01T00:00:00Z"
    status = {"status": {"conditions": [ready], "sandbox": {"name": "warm", "podIPs": ["10.1.2.3"]}}}
    options = ("--subresource=status", "--type=merge", "-p", json.dumps(status))
    plane.kubectl("patch", "-n", namespace, "sandboxclaim", claim, *options)
