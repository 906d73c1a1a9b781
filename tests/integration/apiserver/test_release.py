"""From the chart of one release to that of the next and back, with a running job: no child of it is replaced.

The charts are those that the release command makes; the operator has the version and the defaults of the chart that is
installed. No controller runs: the job's Pods are created here.
"""

from __future__ import annotations

import subprocess

import pytest

from rljob_cluster.control_plane.control_plane import ControlPlane
from rljob_cluster.host.go_programs import find_or_build
from rljob_core.children import common
from rljob_core.defaults import load_defaults
from rljob_core.kube.client import connect
from tests.integration.apiserver.manifests import smallest
from tests.integration.apiserver.operator_harness import NAME, OperatorHarness, WriteRecorder, start_pod
from tests.support.release_repository import add_entry, leave_out_what_is_packed, make_repository, run_release

WORKLOADS = {"head": "Job", "trainer": "StatefulSet", "rollout": "Deployment", "reward-correct": "Deployment"}
OLD, NEW = "0.2.0", "0.2.1"


@pytest.fixture(scope="module")
def charts(tmp_path_factory):
    """The charts of two releases in a row."""
    folder = tmp_path_factory.mktemp("releases")
    with pytest.MonkeyPatch.context() as patch:
        leave_out_what_is_packed(patch)
        repository = make_repository(folder / "repository")
        assert run_release(repository, OLD) == 0
        add_entry(repository, "A fix.")
        assert run_release(repository, NEW) == 0
    return {version: folder / "release" / version / f"rljob-{version}.tgz" for version in (OLD, NEW)}


class Installation:
    """The release of the chart in a cluster, and the operator that its Deployment would run."""

    def __init__(self, harness: OperatorHarness, folder, monkeypatch):
        self.harness, self.folder, self.monkeypatch = harness, folder, monkeypatch

    def call(self, name, *arguments):
        command = [find_or_build("helm", "kubectl") / name, "--kubeconfig", self.harness.kubeconfig, *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{name} {arguments}:\n{done.stdout}{done.stderr}"
        return done.stdout

    def helm(self, verb, *arguments):
        self.call("helm", verb, "rljob", *arguments, "--namespace", "ops")

    async def restart_operator(self, version) -> WriteRecorder:
        """Start the operator of a version with the defaults that the chart has written; return what it writes."""
        await self.harness.stop()
        self.harness.tasks.clear()
        self.harness.apis.clear()
        image = self.call("kubectl", "-n", "ops", "get", "deployment", "rljob-operator", "-o", "jsonpath={..image}")
        assert image == f"rljob/operator:{version}", "helm has installed this version"
        defaults = self.folder / "defaults.yaml"
        path = r"jsonpath={.data.defaults\.yaml}"
        defaults.write_text(
            self.call("kubectl", "-n", "ops", "get", "configmap", "rljob-operator-defaults", "-o", path)
        )
        self.monkeypatch.setattr(common, "__version__", version)
        recorder = WriteRecorder()
        await self.harness.start(
            recorder, resync_seconds=0.4, namespaces=("default",), defaults=load_defaults(defaults)
        )
        return recorder


@pytest.fixture
async def installed(tmp_path, loopback, charts, monkeypatch):
    with ControlPlane(tmp_path, address=f"{loopback}.4", components=("etcd", "kube-apiserver")) as running:
        api = await connect(str(running.kubeconfig))
        installation = Installation(OperatorHarness(api, "default", str(running.kubeconfig)), tmp_path, monkeypatch)
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
        await api.request("POST", "/api/v1/namespaces/default/serviceaccounts", body=account)
        installation.helm("install", charts[OLD], "--create-namespace")
        crds = ("crd/rljobs.rljob.dev", "crd/rewardmodels.rljob.dev")
        installation.call("kubectl", "wait", "--for=condition=Established", *crds, "--timeout=30s")
        yield installation
        await installation.harness.stop()
        await api.close()


async def read_children(harness):
    """Return identity and spec of each workload and Pod of the first job, and the version that it says it has."""
    items = await harness.list("Job", "StatefulSet", "Deployment", "Pod")
    mine = [item for item in items if item["metadata"]["name"].startswith(f"{NAME}-")]
    return {
        (item["kind"], item["metadata"]["name"]): (
            item["metadata"]["uid"],
            item["spec"],
            item["metadata"]["labels"]["app.kubernetes.io/version"],
        )
        for item in mine
    }


async def read_head_image(harness, name):
    head = await harness.get("Job", f"{name}-head")
    return head and head["spec"]["template"]["spec"]["containers"][0]["image"]


async def test_upgrade_to_the_next_release_and_back_replaces_no_child_of_a_running_job(installed, charts):
    harness = installed.harness
    await installed.restart_operator(OLD)
    await harness.create(smallest())
    await harness.until_all_workloads()
    for role, kind in WORKLOADS.items():
        await start_pod(harness, kind, role)
    await harness.wait_for_resyncs()
    before = await read_children(harness)
    assert len(before) == 2 * len(WORKLOADS)
    assert {version for *_, version in before.values()} == {OLD}
    assert await read_head_image(harness, NAME) == f"rljob/trainer:{OLD}"

    installed.helm("upgrade", charts[NEW])
    recorder = await installed.restart_operator(NEW)
    await harness.wait_for_resyncs()
    assert await read_children(harness) == before
    assert recorder.writes == [], "not even a label"
    await harness.create(smallest(name="later"))
    await harness.until("the head of a new job", lambda: read_head_image(harness, "later"))
    assert await read_head_image(harness, "later") == f"rljob/trainer:{NEW}", "the upgrade is for new jobs"

    installed.helm("rollback", "1")
    await installed.restart_operator(OLD)
    await harness.wait_for_resyncs()
    assert await read_children(harness) == before
    assert await read_head_image(harness, "later") == f"rljob/trainer:{NEW}", "the way back replaces nothing either"
