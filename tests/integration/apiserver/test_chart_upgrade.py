"""A running job over an upgrade from an earlier chart, and over `helm uninstall` and a new install.

The operator has the chart's service account, the user the chart's role for authors, and the chart's admission policies
are installed. tests/data/upgrades has the chart of c56f54c2, without descriptions in its CRDs, and what the operator of
that commit wrote under it for the job. No controller runs: the Pods are created here.
"""

from __future__ import annotations

import gzip
import json
import subprocess
from pathlib import Path

import pytest

from rljob_cluster.control_plane.control_plane import ControlPlane
from rljob_cluster.host.go_programs import find_or_build
from rljob_core.defaults import load_defaults
from rljob_core.kube.client import SSA, KubeApi, connect
from tests.integration.apiserver.manifests import smallest
from tests.integration.apiserver.operator_harness import NAME, Manifest, OperatorHarness, WriteRecorder, start_pod
from tests.integration.apiserver.test_stored_objects import ROLES, end_head, has_rollouts, until_workloads
from tests.paths import ROOT

DATA = ROOT / "tests" / "data" / "upgrades"
OLD, NEW = DATA / "chart-c56f54c2.tgz", ROOT / "charts" / "rljob"
NAMESPACE = "research"
GROUPS = ["system:serviceaccounts", "system:serviceaccounts:ops", "system:authenticated"]
WORKLOADS = {"head": "Job", "trainer": "StatefulSet", "rollout": "Deployment", "reward-correct": "Deployment"}
STANDING = ("Secret", "ConfigMap", "Service", "NetworkPolicy", "PodDisruptionBudget")
GONE = {
    ("Service", f"{NAME}-trainer"),
    ("NetworkPolicy", f"{NAME}-trainer"),
    ("PodDisruptionBudget", f"{NAME}-rollout"),
    ("PodDisruptionBudget", f"{NAME}-reward-correct"),
}
"""Children that c56f54c2 made, and that this version does not."""


class Cluster:
    """A namespace with a user, and releases of the chart that watch it."""

    def __init__(self, plane: ControlPlane, folder: Path, admin: OperatorHarness, author: OperatorHarness) -> None:
        self.plane, self.folder, self.admin, self.author = plane, folder, admin, author
        self._programs = find_or_build("helm", "kubectl")

    def call(self, name: str, *arguments: str | Path) -> str:
        command = [self._programs / name, "--kubeconfig", self.plane.kubeconfig, "--namespace", "ops", *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{name} {arguments}:\n{done.stdout}{done.stderr}"
        return done.stdout

    def install(self, chart: Path, *arguments: str, verb: str = "install", release: str = "rljob") -> None:
        self.call("helm", verb, release, chart, "--set", f"watchNamespaces={{{NAMESPACE}}}", *arguments)
        crds = ("crd/rljobs.rljob.dev", "crd/rewardmodels.rljob.dev")
        self.call("kubectl", "wait", "--for=condition=Established", *crds, "--timeout=60s")

    async def start(self, release: str = "rljob") -> WriteRecorder:
        """Start the operator of a release, and return what it writes."""
        defaults = self.folder / "defaults.yaml"
        path = r"jsonpath={.data.defaults\.yaml}"
        defaults.write_text(self.call("kubectl", "get", "configmap", f"{release}-operator-defaults", "-o", path))
        account = f"system:serviceaccount:ops:{release}-operator"
        recorder = WriteRecorder()
        await self.admin.start(
            recorder,
            kubeconfig=str(self.plane.kubeconfig_for(account, GROUPS)),
            resync_seconds=0.4,
            defaults=load_defaults(defaults),
        )
        return recorder

    async def stop(self) -> None:
        await self.admin.stop()
        self.admin.tasks.clear()
        self.admin.apis.clear()

    async def read(self, *kinds: str) -> dict[tuple[str, str], tuple[str, Manifest]]:
        """Return uid and content of each object of the job."""
        items = await self.admin.list(*kinds)
        return {
            (item["kind"], item["metadata"]["name"]): (
                item["metadata"]["uid"],
                item.get("spec") or item.get("data"),
            )
            for item in items
            if item["metadata"]["name"].startswith(f"{NAME}-")
        }

    async def read_running(self) -> dict[tuple[str, str], tuple[str, Manifest]]:
        return await self.read(*set(WORKLOADS.values()), "Pod")

    async def start_pods(self) -> None:
        for role, kind in WORKLOADS.items():
            await start_pod(self.admin, kind, role)

    async def delete_pods(self) -> None:
        for role in WORKLOADS:
            await self.admin.delete("Pod", f"{NAME}-{role}-0", gracePeriodSeconds=0)

    async def check_events(self) -> None:
        """Nothing was refused to the operator."""
        reasons = {event["reason"] for event in await self.admin.list("Event")}
        assert not reasons & {"Forbidden", "StatusRefused", "ApiServerError", "ReconcileFailed"}, reasons


@pytest.fixture
async def cluster(tmp_path, loopback):
    with ControlPlane(tmp_path, address=f"{loopback}.11", components=("etcd", "kube-apiserver")) as plane:
        api, user = await connect(str(plane.kubeconfig)), await connect(str(plane.kubeconfig_for("ann")))
        found = Cluster(
            plane,
            tmp_path,
            OperatorHarness(api, NAMESPACE, str(plane.kubeconfig)),
            OperatorHarness(user, NAMESPACE, str(plane.kubeconfig_for("ann"))),
        )
        for name in (NAMESPACE, "ops"):
            found.call("kubectl", "create", "namespace", name)
        found.call("kubectl", "create", "serviceaccount", "default", "-n", NAMESPACE)
        binding = ("rolebinding", "authors", "--user=ann", "--clusterrole=ops-rljob-operator-admin", "-n", NAMESPACE)
        found.call("kubectl", "create", *binding)
        yield found
        await found.admin.stop()
        await api.close()
        await user.close()


async def restore(api: KubeApi, author: OperatorHarness) -> None:
    """Create the job, and write what the operator of c56f54c2 wrote for it."""
    owner = await author.create(smallest())
    recorded = json.loads(gzip.decompress((DATA / "written-c56f54c2.json.gz").read_bytes()))
    text = json.dumps(recorded["writes"]).replace(recorded["uid"], owner["metadata"]["uid"])
    for write in json.loads(text):
        await api.request("PATCH", write["path"], query=write["query"], body=write["body"], content_type=SSA)


async def test_job_of_an_earlier_chart_keeps_its_pods_and_can_be_written_and_ended(cluster):
    admin, author = cluster.admin, cluster.author
    cluster.install(OLD)
    await restore(admin.api, author)
    await cluster.start_pods()
    before, standing = await cluster.read_running(), await cluster.read(*STANDING)
    assert len(before) == 2 * len(WORKLOADS)
    assert set(standing) >= GONE

    cluster.install(NEW, verb="upgrade")
    recorder = await cluster.start()
    await admin.until_condition("Running")
    for kind, name in GONE:
        await admin.until_deleted(kind, name)
    assert await cluster.read_running() == before
    assert (await cluster.read(*STANDING)).keys() == standing.keys() - GONE
    await admin.wait_for_resyncs()
    recorder.writes.clear()
    await admin.wait_for_resyncs()
    assert recorder.writes == [], "it settles"

    await author.patch("RLJob", NAME, {"metadata": {"annotations": {"example.com/note": "x"}}})
    scale = f"{author.path('RLJob', NAME)}/scale"
    await author.api.request(
        "PATCH", scale, body={"spec": {"replicas": 2}}, content_type="application/merge-patch+json"
    )
    await admin.until("two rollouts", lambda: has_rollouts(admin, NAME, 2))
    assert {key: uid for key, (uid, _) in (await cluster.read_running()).items()} == {
        key: uid for key, (uid, _) in before.items()
    }
    await admin.until("their budget", lambda: admin.get("PodDisruptionBudget", f"{NAME}-rollout"))
    await author.patch("RLJob", NAME, {"spec": {"suspend": True}})
    await until_workloads(admin, NAME)
    await cluster.delete_pods()
    await admin.until_condition("Suspended")
    await author.patch("RLJob", NAME, {"spec": {"suspend": False}})
    await until_workloads(admin, NAME, *ROLES)
    await cluster.start_pods()
    await admin.until_condition("Running")
    await end_head(admin, NAME)
    await admin.until_condition("Succeeded")
    await until_workloads(admin, NAME, "head")
    await cluster.check_events()


async def test_uninstall_keeps_jobs_and_a_new_install_takes_them_over(cluster):
    """Under the same name, and under another."""
    admin, author = cluster.admin, cluster.author
    cluster.install(NEW)
    await cluster.start()
    await author.create(smallest())
    await until_workloads(admin, NAME, *ROLES)
    await cluster.start_pods()
    await admin.until_condition("Running")
    await admin.wait_for_resyncs()
    before = await cluster.read_running() | await cluster.read(*STANDING)
    others = "validatingadmissionpolicies,clusterroles,roles,deployments"
    labelled = ("-l", "app.kubernetes.io/instance=rljob", "-o", "name")
    for release, arguments in (("rljob", ()), ("rljob-two", ("--take-ownership",))):
        await cluster.stop()
        cluster.call("helm", "uninstall", "rljob")
        assert cluster.call("kubectl", "get", others, "-A", *labelled) == "", "nothing else of the chart stays"
        assert await cluster.read_running() | await cluster.read(*STANDING) == before
        assert (await admin.condition("Running"))["status"] == "True", "the status stays as it was"
        cluster.install(NEW, *arguments, release=release)
        recorder = await cluster.start(release)
        await admin.wait_for_resyncs()
        assert recorder.writes == []
        assert await cluster.read_running() | await cluster.read(*STANDING) == before
    await cluster.check_events()
