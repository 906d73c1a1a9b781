"""The operator with exactly the permissions that the chart grants, on a real API server with RBAC.

It runs as its service account, with the rendered roles of a namespaced installation. Controllers are missing: the tests
create the Pods.
"""

from __future__ import annotations

import subprocess

import pytest

from rljob_api.wire.contract import LABEL_JOB, LABEL_MANAGED_BY, LABEL_ROLE, MANAGED_BY, SCHEDULING_GATE
from rljob_cluster.host.go_programs import find_or_build
from tests.integration.apiserver.manifests import put_all, smallest
from tests.integration.apiserver.operator_harness import NAME
from tests.paths import ROOT
from tests.support import fast_yaml

ROLES = ("head", "trainer", "rollout", "reward")
GROUPS = ["system:serviceaccounts", "system:authenticated"]


@pytest.fixture
def start(control_plane, harness):
    """Return a function that starts the operator with the permissions of some features."""

    async def run(*features):
        roles = render_roles(harness.namespace, features)
        control_plane.kubectl("apply", "-f", "-", input=roles)
        binding = next(o for o in fast_yaml.load_all(roles) if o["kind"] == "RoleBinding")
        account = f"system:serviceaccount:{harness.namespace}:{binding['subjects'][0]['name']}"
        kubeconfig = control_plane.kubeconfig_for(account, GROUPS)
        return await harness.start(kubeconfig=str(kubeconfig), resync_seconds=3600.0)

    return run


def render_roles(namespace, features):
    sets = [f"watchNamespaces={{{namespace}}}", *(f"features.{name}=true" for name in features)]
    command = [find_or_build("helm") / "helm", "template", namespace, ROOT / "charts" / "rljob", "-n", namespace]
    command += ["--kube-version", "1.37.0", "--set", ",".join(sets), "-s", "templates/rbac.yaml"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def create_gated_pods(harness):
    job = await harness.get("RLJob", NAME)
    owner = {"apiVersion": job["apiVersion"], "kind": "RLJob", "name": NAME, "uid": job["metadata"]["uid"]}
    spec = {"containers": [{"name": "a", "image": "a"}], "schedulingGates": [{"name": SCHEDULING_GATE}]}
    for role in ROLES:
        labels = {LABEL_JOB: NAME, LABEL_ROLE: role, LABEL_MANAGED_BY: MANAGED_BY}
        labels |= {"rljob.dev/reward": "correct"} if role == "reward" else {}
        metadata = {"name": f"{NAME}-{role}-0", "labels": labels, "ownerReferences": [owner]}
        await harness.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})


async def find_gated_pods(harness):
    return [pod["metadata"]["name"] for pod in await harness.list("Pod") if pod["spec"].get("schedulingGates")]


async def test_job_gets_its_children_status_and_end_with_the_smallest_roles(harness, start):
    await start()
    await harness.create(smallest())
    await harness.until_all_workloads()
    await harness.delete_until_recreated("Deployment", f"{NAME}-rollout")
    await harness.patch("RLJob", NAME, {"spec": {"suspend": True}})
    assert await harness.until_condition("Suspended")
    assert await harness.until("an event, which is written in the background", lambda: harness.list("Event"))


async def test_gang_with_gates_names_the_missing_feature_in_its_status(harness, start):
    await start()
    await harness.create(put_all(smallest(), {"scheduling.gang": "gates"}))
    await harness.until_all_workloads()
    await create_gated_pods(harness)
    (event, *_) = await harness.until_event("Forbidden")
    assert "set features.schedulingGates" in event["message"]
    assert "features.schedulingGates" in (await harness.condition("Running"))["message"]
    assert len(await find_gated_pods(harness)) == len(ROLES)


async def test_gang_with_gates_starts_with_its_feature(harness, start):
    await start("schedulingGates")
    await harness.create(put_all(smallest(), {"scheduling.gang": "gates"}))
    await harness.until_all_workloads()
    await create_gated_pods(harness)

    async def are_ungated():
        return not await find_gated_pods(harness)

    await harness.until("the removal of the gates", are_ungated)
