"""What the checks of Pod templates refuse, a real API server refuses.

Each workload is applied as the operator applies it (server-side, forced), as a dry run.
"""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
from kubernetes import client, dynamic

from rljob_api.errors import UserError
from rljob_core.children import WORKLOAD_KINDS, build_children
from rljob_core.defaults import DEFAULTS
from rljob_core.pod_checks import find_violations
from tests.integration.apiserver.manifests import put_all, smallest
from tests.integration.apiserver.operator_harness import NAME
from tests.support.any_template import mutate
from tests.support.job_simulation import make_job
from tests.support.pod_templates import ACCEPTED, REFUSED

_NUM_MUTATIONS = 300


class Oracle:
    """What the API server says about a workload."""

    def __init__(self, api: client.ApiClient, namespace: str) -> None:
        self._dynamic, self._namespace = dynamic.DynamicClient(api), namespace

    def refusal(self, workload: dict[str, Any]) -> str:
        """Return why the API server refuses a workload or its Pods; empty if it takes them.

        For a StatefulSet it checks the Pods only when they are created."""
        template = workload["spec"]["template"]
        template = {"metadata": {}} | template
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        return self._apply(workload) or self._apply(pod)

    def _apply(self, manifest: dict[str, Any]) -> str:
        kind, metadata = manifest["kind"], manifest["metadata"]
        resource = self._dynamic.resources.get(api_version=manifest["apiVersion"], kind=kind)
        if isinstance(metadata, dict):
            kept = {key: value for key, value in metadata.items() if key != "ownerReferences"}
            metadata = kept | {"namespace": self._namespace, "name": "checked"}
        body = manifest | {"metadata": metadata}
        options = {"namespace": self._namespace, "field_manager": "rljob", "force_conflicts": True, "dry_run": "All"}
        try:
            resource.server_side_apply(body=body, name="checked", **options)
        except client.ApiException as error:
            if error.status == 403 and "serviceaccount" in str(error.body):  # exists in the user's cluster
                return ""
            return str(error.body)
        return ""


@pytest.fixture
def oracle(api_client, namespace):
    return Oracle(api_client, namespace)


def workloads_of(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the workloads; none for a template that cannot even be merged."""
    with contextlib.suppress(UserError):
        return [c for c in build_children(make_job(**spec), "token", DEFAULTS) if c["kind"] in WORKLOAD_KINDS]
    return []


@pytest.mark.parametrize(("spec", "path", "message"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_is_refused_here_is_refused_by_the_api_server(oracle, spec, path, message):
    workloads = workloads_of(spec)
    assert not workloads or any(oracle.refusal(workload) for workload in workloads)
    for workload in workloads:
        violations = find_violations(workload["spec"]["template"])
        assert bool(violations) == bool(oracle.refusal(workload)), violations


@pytest.mark.parametrize("spec", ACCEPTED, ids=lambda value: str(value)[:60])
def test_what_the_api_server_takes_is_taken_here(oracle, spec):
    for workload in workloads_of(spec):
        assert oracle.refusal(workload) == ""
        assert find_violations(workload["spec"]["template"]) == ()


def test_mutated_pods_are_never_refused_here_and_taken_there(oracle):
    """One value of an accepted template at a time is replaced by another, or a key is renamed."""
    source = random.Random(12)
    for _ in range(_NUM_MUTATIONS):
        workload = source.choice(workloads_of(source.choice(ACCEPTED)))
        mutated = mutate(workload["spec"]["template"], source)
        changed = workload | {"spec": workload["spec"] | {"template": mutated}}
        violations, refusal = find_violations(mutated), oracle.refusal(changed)
        assert refusal or not violations, (violations, mutated)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer.resources": {"requests": {"cpu": 2}, "limits": {"cpu": 1}}}, "spec.trainer.resources.requests"),
        ({"rollout.template": {"spec": {"nodeSelector": ["a"]}}}, "spec.rollout.template.spec.nodeSelector"),
    ],
)
async def test_job_with_a_refused_pod_fails_at_once_without_a_workload_until_it_is_fixed(harness, changes, message):
    await harness.start()
    await harness.create(put_all(smallest(), changes))
    failed = await harness.until_condition("Failed")
    assert (failed["reason"], failed["message"].startswith(message)) == ("InvalidSpec", True), failed
    assert await harness.workloads() == [], "no Pod holds a node"
    role, field = next(iter(changes)).split(".")
    await harness.patch("RLJob", NAME, {"spec": {role: {field: None}}})
    await harness.until_all_workloads()
