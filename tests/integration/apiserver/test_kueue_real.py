"""Jobs under a real Kueue: the gang, autoscaled rewards, quota and preemption, on fake nodes.

Kueue is in no Go module that builds alone: RLJOB_KUEUE names a checkout of kubernetes-sigs/kueue with its program as
bin/manager (`CGO_ENABLED=0 go build -o bin/manager ./cmd/kueue`). Without it these tests are skipped.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob_cluster.control_plane.control_plane import COMPONENTS, ControlPlane, free_port
from rljob_cluster.control_plane.kwok import CONTROLLER_ARGUMENTS, run_kwok
from rljob_cluster.host.commands import ClusterError
from rljob_cluster.host.processes import ProcessGroup
from tests.integration.apiserver.manifests import put_all, smallest
from tests.paths import ROOT
from tests.support.waiting import DEADLINE_SECONDS

SOURCE = Path(os.environ.get("RLJOB_KUEUE", "/nonexistent"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (SOURCE / "bin/manager").exists(), reason="RLJOB_KUEUE names no built Kueue"),
]
ADDRESS = "127.0.0.1"
METRICS_CERTIFICATES = Path("/etc/kueue/metrics/certs")
"""A fixed path: these tests need root."""
KINDS = ("job", "deployment", "statefulset", "pod", "clusterqueue", "resourceflavor", "workload", "cohort")
WEBHOOKS = {f"{verb}{kind}.kb.io" for verb in "mv" for kind in KINDS}
"""Those of what exists here; other frameworks that Kueue ships with have no CRDs."""
EXTERNAL = ["RLJob.v1alpha1.rljob.dev", "RewardModel.v1alpha1.rljob.dev"]
QUEUES = """
apiVersion: kueue.x-k8s.io/v1beta2
kind: ResourceFlavor
metadata: {name: default}
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: ClusterQueue
metadata: {name: cluster}
spec:
  namespaceSelector: {}
  preemption: {withinClusterQueue: LowerPriority}
  resourceGroups:
  - coveredResources: [cpu, memory, ephemeral-storage]
    flavors:
    - name: default
      resources:
      - {name: cpu, nominalQuota: "QUOTA"}
      - {name: memory, nominalQuota: 1Ti}
      - {name: ephemeral-storage, nominalQuota: 1Ti}
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: LocalQueue
metadata: {name: research, namespace: default}
spec: {clusterQueue: cluster}
"""
CPU = {"resources": {"requests": {"cpu": "1"}}}
REWARD = smallest()["spec"]["rewards"][0]


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    folder = tmp_path_factory.mktemp("kueue")
    extra = {"kube-controller-manager": CONTROLLER_ARGUMENTS}
    with (
        ControlPlane(folder, components=COMPONENTS, extra_arguments=extra) as plane,
        run_kwok(plane, num_nodes=2, jobs_end=False),
    ):
        plane.kubectl("apply", "-f", str(ROOT / "crds"))
        with Kueue(plane, folder):
            yield plane


class Kueue:
    """Kueue's manager with the frameworks that it ships with, among them those of Jobs and Deployments."""

    def __init__(self, plane: ControlPlane, folder: Path) -> None:
        self.plane, self.folder, self.processes = plane, folder, ProcessGroup(folder / "logs")

    def __enter__(self) -> None:
        port, metrics, health = (free_port(ADDRESS) for _ in range(3))
        certificate, key = self.plane.pki.certificate("kueue", "kueue", hosts=[ADDRESS, "localhost"])
        METRICS_CERTIFICATES.mkdir(parents=True, exist_ok=True)
        for folder in (self.folder, METRICS_CERTIFICATES):
            (folder / "tls.crt").write_bytes(certificate.read_bytes())
            (folder / "tls.key").write_bytes(key.read_bytes())
        crds = sorted((SOURCE / "config/components/crd/bases").glob("*.yaml"))
        self.plane.kubectl("create", "namespace", "kueue-system")
        for crd in crds:
            self.plane.kubectl("create", "-f", str(crd))
        self.plane.kubectl("wait", "crd", "--all", "--for=condition=Established", "--timeout=60s")
        shipped = yaml.safe_load((SOURCE / "config/components/manager/controller_manager_config.yaml").read_text())
        config = {
            "apiVersion": "config.kueue.x-k8s.io/v1beta2",
            "kind": "Configuration",
            "namespace": "kueue-system",
            "health": {"healthProbeBindAddress": f"{ADDRESS}:{health}"},
            "metrics": {"bindAddress": f"{ADDRESS}:{metrics}"},
            "webhook": {"host": ADDRESS, "port": port, "certDir": str(self.folder)},
            "leaderElection": {"leaderElect": False},
            "internalCertManagement": {"enable": False},
            "integrations": shipped["integrations"] | {"externalFrameworks": EXTERNAL},
            "clientConnection": {"qps": 300, "burst": 500},
            "managedJobsNamespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "default"}},
        }
        (self.folder / "config.yaml").write_text(yaml.safe_dump(config))
        command = [str(SOURCE / "bin/manager"), f"--config={self.folder / 'config.yaml'}"]
        gates = "--feature-gates=VisibilityOnDemand=false"
        self.processes.start("kueue", ["env", f"KUBECONFIG={self.plane.kubeconfig}", *command, gates])
        self._install_webhooks(port)

    def __exit__(self, *_: object) -> None:
        self.processes.stop_all()
        shutil.rmtree(METRICS_CERTIFICATES.parents[1])

    def _install_webhooks(self, port: int) -> None:
        bundle = base64.b64encode(self.plane.pki.ca.read_bytes()).decode()
        documents = yaml.safe_load_all((SOURCE / "config/components/webhook/manifests.yaml").read_text())
        for document in documents:
            kept = [hook for hook in document["webhooks"] if hook["name"] in WEBHOOKS]
            for hook in kept:
                path = hook["clientConfig"]["service"]["path"]
                hook["clientConfig"] = {"url": f"https://{ADDRESS}:{port}{path}", "caBundle": bundle}
                hook["namespaceSelector"] = {"matchLabels": {"kubernetes.io/metadata.name": "default"}}
            document["webhooks"] = kept
            self.plane.kubectl("apply", "-f", "-", input=json.dumps(document))


class Cluster:
    """kubectl, and conditions with a deadline."""

    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane

    def get(self, kind: str, name: str = "", *options: str) -> Any:
        return json.loads(self.plane.kubectl("get", kind, *([name] if name else []), *options, "-o", "json"))

    def create_job(self, name: str, **changes: Any) -> None:
        roles = {"head": CPU, "trainer": CPU, "rollout": CPU | {"replicas": 2}, "rewards": [REWARD | CPU]}
        scheduling = {"gang": "kueue", "queue": "research", "timeoutSeconds": 300}
        job = put_all(smallest(name=name), roles | {"scheduling": scheduling} | changes)
        self.plane.kubectl("apply", "-f", "-", input=json.dumps(job))

    def patch(self, name: str, change: Any) -> None:
        self.plane.kubectl("patch", "rljob", name, "--type=merge", "-p", json.dumps({"spec": change}))

    def phase(self, name: str) -> str:
        return str((self.get("rljob", name).get("status") or {}).get("phase", ""))

    def condition(self, name: str, type_: str) -> Any:
        found = self.get("rljob", name)["status"]["conditions"]
        return next(condition for condition in found if condition["type"] == type_)

    def pods(self, name: str, role: str = "") -> dict[str, Any]:
        """The Pods that are not being deleted, by name."""
        selector = f"rljob.dev/job={name}" + (f",{role}" if role else "")
        items = self.get("pods", "", "-l", selector)["items"]
        return {pod["metadata"]["name"]: pod for pod in items if "deletionTimestamp" not in pod["metadata"]}

    def until(self, what: str, holds: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not (value := holds()):
            logs = {log.name: log.read_text()[-3000:] for log in (self.plane.folder / "logs").glob("*.log")}
            seen = self.plane.kubectl("get", "rljobs,pods,workloads", "-A")
            seen += "\n".join(str(w.get("status")) for w in self.get("workloads")["items"])
            assert time.monotonic() < deadline, f"never came: {what}\n{seen}\n{logs.get('kueue.log')}"
            time.sleep(0.3)
        return value

    def until_phase(self, name: str, phase: str) -> None:
        self.until(f"{name} {phase}", lambda: self.phase(name) == phase)

    def set_quota(self, cpus: int) -> None:
        self.until("the webhooks", lambda: self._apply(QUEUES.replace("QUOTA", str(cpus))))

    def _apply(self, text: str) -> bool:
        try:
            self.plane.kubectl("apply", "-f", "-", input=text)
        except ClusterError:  # the webhooks do not listen yet
            return False
        return True


@pytest.fixture
def cluster(plane: ControlPlane) -> Iterator[Cluster]:
    processes = ProcessGroup(plane.folder / "logs")
    command = [sys.executable, "-m", "rljob_operator", "--no-lease", "--namespace=default", "--health-port=0"]
    processes.start("operator", [*command, "--metrics-port=0", f"--kubeconfig={plane.kubeconfig}"])
    found = Cluster(plane)
    yield found
    plane.kubectl("delete", "rljobs", "--all")
    found.until("an empty namespace", lambda: not found.get("pods")["items"] and not found.get("workloads")["items"])
    processes.stop_all()


def test_autoscaled_reward_grows_outside_the_group(cluster: Cluster) -> None:
    cluster.set_quota(12)
    scaled = {"name": "scaled", "weight": 0, "autoscaling": {"minReplicas": 1, "maxReplicas": 8}}
    rewards = [REWARD | CPU, REWARD | CPU | scaled]
    cluster.create_job("elastic", rewards=rewards)
    cluster.until_phase("elastic", "Running")
    group = cluster.get("workload", "elastic")
    assert sum(podset["count"] for podset in group["spec"]["podSets"]) == 5
    before = cluster.pods("elastic")
    rewards[1]["autoscaling"]["minReplicas"] = 4
    cluster.patch("elastic", {"rewards": rewards})
    selector = "rljob.dev/reward=scaled"

    def has_grown() -> bool:
        pods = cluster.pods("elastic", selector).values()
        return len(pods) == 4 and all(pod["status"]["phase"] == "Running" for pod in pods)

    cluster.until("four Pods of the autoscaled reward", has_grown)
    after = cluster.pods("elastic")
    assert {name: pod["metadata"]["uid"] for name, pod in before.items()}.items() <= {
        name: pod["metadata"]["uid"] for name, pod in after.items()
    }.items(), "no other Pod is replaced"
    assert len(cluster.get("workloads")["items"]) == 5, "the group, and one for each Pod of the reward"
    reasons = {event["reason"] for event in cluster.get("events")["items"]}
    assert "ExcessPodDeleted" not in reasons
    assert cluster.phase("elastic") == "Running"
    rewards[1]["autoscaling"]["minReplicas"] = 1
    with pytest.raises(ClusterError, match=r"rollout.replicas is immutable under scheduling.gang: kueue"):
        cluster.patch("elastic", {"rollout": {"replicas": 3}})


def test_job_waits_for_quota_and_its_deadline_with_it(cluster: Cluster) -> None:
    cluster.set_quota(5)
    cluster.create_job("first")
    cluster.until_phase("first", "Running")
    cluster.create_job("second", activeDeadlineSeconds=2)
    cluster.until_phase("second", "Queued")
    cluster.until("all Pods of the second", lambda: len(cluster.pods("second")) == 5)
    cluster.until("the reason", lambda: cluster.condition("second", "Queued")["reason"] == "WaitingForQuota")
    status = cluster.get("rljob", "second")["status"]
    assert (status.get("activeSince"), status["activeSeconds"]) == (None, 0)
    cluster.patch("second", {"activeDeadlineSeconds": 3600})
    cluster.plane.kubectl("delete", "rljob", "first")
    cluster.until_phase("second", "Running")
    assert cluster.get("rljob", "second")["status"]["activeSince"]


def test_preempted_job_is_queued_and_runs_again(cluster: Cluster) -> None:
    cluster.set_quota(5)
    high = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "high"}, "value": 1000}
    cluster.plane.kubectl("apply", "-f", "-", input=json.dumps(high))
    # As no kubelet runs, a head that Kueue deletes is never reported as failed, and its Job would wait for it.
    cluster.create_job("low", **{"scheduling.forceDeleteAfterSeconds": 10})
    cluster.until_phase("low", "Running")
    cluster.create_job("urgent", priorityClassName="high")
    cluster.until_phase("urgent", "Running")
    cluster.until_phase("low", "Queued")
    assert cluster.condition("low", "Queued")["reason"] == "WaitingForQuota"
    assert cluster.get("rljob", "low")["status"].get("activeSince") is None
    cluster.plane.kubectl("delete", "rljob", "urgent")
    cluster.until_phase("low", "Running")
