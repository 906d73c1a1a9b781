"""The jobs of examples/gpu on nodes that claim 8 GPUs each: Pods, pools, gang and the queue are real, no Pod computes.

The real scheduler places the Pods that the operator creates; KWOK's nodes say that they run.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from rljob_api.wire.termination import ERROR_PREFIX, GPU_FAULT_PREFIX
from rljob_cli.main import app
from rljob_cluster.control_plane.control_plane import COMPONENTS, ControlPlane
from rljob_cluster.control_plane.kwok import CONTROLLER_ARGUMENTS, build_node, run_kwok
from rljob_cluster.host import go_programs
from rljob_cluster.host.processes import ProcessGroup
from tests.paths import EXAMPLES, ROOT
from tests.support.waiting import DEADLINE_SECONDS

pytestmark = pytest.mark.slow
GPU = "nvidia.com/gpu"
RACK = "example.com/rack"
NODES = {
    "shared-0": ("shared", "a"),
    **{f"trainer-{index}": ("trainer", rack) for index, rack in enumerate("aabb")},
    **{f"rollout-{index}": ("rollout", "c") for index in range(3)},
}
"""Pool and rack of each node with 8 GPUs."""
CLAIMS = ("runs", "models")
Pod = dict[str, Any]


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    folder = tmp_path_factory.mktemp("gpus")
    go_programs.find_or_build("kubectl")
    extra = {"kube-controller-manager": CONTROLLER_ARGUMENTS}
    with (
        ControlPlane(folder, components=COMPONENTS, extra_arguments=extra) as plane,
        run_kwok(plane, num_nodes=1, jobs_end=False),
    ):
        nodes = [
            build_node(name, {"rljob.dev/pool": pool, RACK: rack}, {GPU: 8}) for name, (pool, rack) in NODES.items()
        ]
        plane.kubectl("apply", "-f", "-", input=yaml.safe_dump_all([*nodes, *build_claims()]))
        plane.kubectl("apply", "-f", str(ROOT / "crds"))
        plane.kubectl("wait", "node", "--all", "--for=condition=Ready", "--timeout=60s")
        plane.kubectl("wait", "crd", "--all", "--for=condition=Established", "--timeout=60s")
        processes = ProcessGroup(plane.folder / "logs")
        command = [sys.executable, "-m", "rljob_operator", "--no-lease", "--namespace=default", "--health-port=0"]
        processes.start("operator", [*command, "--metrics-port=0", f"--kubeconfig={plane.kubeconfig}"])
        yield plane
        processes.stop_all()


def build_claims() -> Iterator[dict[str, Any]]:
    """Bound claims, without which the scheduler places no Pod that mounts them."""
    for name in CLAIMS:
        common = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
        volume = common | {"capacity": {"storage": "1Ti"}, "hostPath": {"path": f"/{name}"}}
        claim = common | {"volumeName": name, "resources": {"requests": {"storage": "1Ti"}}}
        yield {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": volume}
        yield {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": claim}


class Cluster:
    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane

    def get(self, kind: str, *arguments: str) -> Any:
        return json.loads(self.plane.kubectl("get", kind, *arguments, "-o", "json"))

    def create_job(self, size: str, name: str = "", **scheduling: Any) -> str:
        """Create an example's job, with its reward as `rljob submit` would take it along."""
        folder = EXAMPLES / "gpu"
        job = yaml.safe_load((folder / f"{size}.yaml").read_text())
        function = job["spec"]["rewards"][0]["function"]
        function["inline"] = (folder / function.pop("file")).read_text()
        job["metadata"]["name"] = name or job["metadata"]["name"]
        job["spec"]["scheduling"] |= scheduling
        self.plane.kubectl("apply", "-f", "-", input=json.dumps(job))
        return str(job["metadata"]["name"])

    def pods(self, name: str) -> list[Pod]:
        return self.get("pods", "-l", f"rljob.dev/job={name}")["items"]  # type: ignore[no-any-return]

    def condition(self, name: str, type_: str) -> dict[str, Any]:
        conditions = self.get("rljob", name).get("status", {}).get("conditions", [])
        return next((each for each in conditions if each["type"] == type_), {})

    def phase(self, name: str) -> str:
        return str(self.get("rljob", name).get("status", {}).get("phase", ""))

    def until(self, what: str, holds: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not (value := holds()):
            assert time.monotonic() < deadline, f"never came: {what}\n{self.describe()}"
            time.sleep(0.3)
        return value

    def describe(self) -> str:
        log = (self.plane.folder / "logs/operator.log").read_text()[-2000:]
        return self.plane.kubectl("get", "rljobs,pods,pvc", "-o", "wide") + log

    def explain(self, name: str) -> str:
        done = CliRunner().invoke(app, ["explain", name, "-n", "default", "--kubeconfig", str(self.plane.kubeconfig)])
        return " ".join(done.output.split())


@pytest.fixture
def cluster(plane: ControlPlane) -> Iterator[Cluster]:
    found = Cluster(plane)
    yield found
    plane.kubectl("delete", "rljobs", "--all")
    found.until("an empty namespace", lambda: not found.get("pods")["items"])


def count_gpus(pod: Pod) -> int:
    return sum(int(c["resources"].get("limits", {}).get(GPU, 0)) for c in pod["spec"]["containers"])


def role_of(pod: Pod) -> str:
    return str(pod["metadata"]["labels"]["rljob.dev/role"])


def nodes_of(pods: list[Pod], role: str) -> Counter[str]:
    """Return the GPUs that a role holds on each node. A Pod that is not scheduled holds none."""
    held: Counter[str] = Counter()
    for pod in pods:
        if role_of(pod) == role and "nodeName" in pod["spec"]:
            held[pod["spec"]["nodeName"]] += count_gpus(pod)
    return held


def test_trainers_of_32b_are_in_one_rack(cluster: Cluster) -> None:
    name = cluster.create_job("32b")
    cluster.until("Running", lambda: cluster.phase(name) == "Running")
    nodes = nodes_of(cluster.pods(name), "trainer")
    assert set(nodes.values()) == {8}
    assert len({NODES[node][1] for node in nodes}) == 1


def report_broken_gpu(cluster: Cluster, pod: Pod) -> None:
    """What a kubelet reports once the container that says so has restarted."""
    statuses = pod["status"]["containerStatuses"]
    fault = {"exitCode": 75, "message": f"{ERROR_PREFIX}{GPU_FAULT_PREFIX}uncorrectable ECC error encountered"}
    statuses[0] |= {"lastState": {"terminated": fault}, "restartCount": 1}
    change = json.dumps({"status": {"containerStatuses": statuses}})
    name = pod["metadata"]["name"]
    cluster.plane.kubectl("patch", "pod", name, "--subresource=status", "--type=merge", "-p", change)


def test_rollouts_leave_a_node_with_a_broken_gpu_and_other_roles_stay(cluster: Cluster) -> None:
    name = cluster.create_job("7b")
    cluster.until("Running", lambda: cluster.phase(name) == "Running")
    before = cluster.pods(name)
    reporter = next(pod for pod in before if role_of(pod) == "rollout")
    broken = reporter["spec"]["nodeName"]
    report_broken_gpu(cluster, reporter)

    def has_moved() -> bool:
        held = nodes_of(cluster.pods(name), "rollout")
        return broken not in held and sum(held.values()) == 8

    cluster.until(f"all rollouts on nodes other than {broken}", has_moved)
    cluster.until("Running", lambda: cluster.phase(name) == "Running")
    [avoided] = cluster.get("rljob", name)["status"]["avoidedNodes"]
    assert (avoided["role"], avoided["node"], avoided["pod"]) == ("rollout", broken, reporter["metadata"]["name"])
    others = {pod["metadata"]["uid"] for pod in before if role_of(pod) != "rollout"}
    assert others <= {pod["metadata"]["uid"] for pod in cluster.pods(name)}


def test_three_sizes_fill_their_pools_and_a_fourth_job_waits_and_says_why(cluster: Cluster) -> None:
    sizes = {}
    for size in ("7b", "32b", "1.5b"):  # 32B would take GPUs of each node, and leave none whole
        sizes[size] = name = cluster.create_job(size)
        cluster.until(f"{name} Running", lambda name=name: cluster.phase(name) == "Running")
    pods = {size: cluster.pods(name) for size, name in sizes.items()}
    assert {size: Counter(map(role_of, found)) for size, found in pods.items()} == {
        "7b": {"head": 1, "trainer": 1, "rollout": 8, "reward": 1},
        "32b": {"head": 1, "trainer": 2, "rollout": 4, "reward": 1},
        "1.5b": {"head": 1, "trainer": 1, "rollout": 4, "reward": 1},
    }
    for found in pods.values():
        assert not any(pod["spec"].get("schedulingGates") for pod in found)
        assert {pod["spec"]["nodeName"] for pod in found if not count_gpus(pod)} == {"kwok-0"}
    for size in ("7b", "32b"):
        for role in ("trainer", "rollout"):
            pools = {NODES[node][0] for node in nodes_of(pods[size], role)}
            assert pools == {role}, f"{size}: {role}s are in their own pool"
    assert nodes_of(pods["1.5b"], "trainer") + nodes_of(pods["1.5b"], "rollout") == {"shared-0": 8}
    trainers, rollouts = (nodes_of(pods["7b"], role) + nodes_of(pods["32b"], role) for role in ("trainer", "rollout"))
    assert sorted(trainers.values()) == [8, 8, 8]
    assert rollouts == {f"rollout-{index}": 8 for index in range(3)}
    assert len(nodes_of(pods["7b"], "rollout")) == 1

    fourth = cluster.create_job("7b", "fourth", timeoutSeconds=10)
    cluster.until("its reason", lambda: cluster.condition(fourth, "Queued").get("reason") == "WaitingForNodes")
    cluster.until("an explanation", lambda: "Insufficient nvidia.com/gpu" in cluster.explain(fourth))
    cluster.until("released nodes", lambda: cluster.condition(fourth, "Queued").get("reason") == "TimedOut")
    cluster.until("no Pod", lambda: not cluster.pods(fourth))
    for name in sizes.values():
        cluster.until(f"{name} Running", lambda name=name: cluster.phase(name) == "Running")
    kept = {size: {pod["metadata"]["uid"] for pod in cluster.pods(name)} for size, name in sizes.items()}
    assert kept == {size: {pod["metadata"]["uid"] for pod in found} for size, found in pods.items()}
    cluster.plane.kubectl("delete", "rljob", sizes["7b"])
    # Without its backoff, so that the test need not wait for it.
    cluster.plane.kubectl("delete", "rljob", fourth)
    fourth = cluster.create_job("7b", "fourth")
    cluster.until("the fourth Running", lambda: cluster.phase(fourth) == "Running")
