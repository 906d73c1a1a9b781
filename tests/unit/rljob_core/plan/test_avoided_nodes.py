"""Nodes with a broken GPU: who reports them, which Pods avoid them and which stay, and when they are forgotten."""

from datetime import timedelta

import pytest

from rljob_api.manifest.status import MAX_AVOIDED_NODES
from rljob_api.wire.driver_status import DriverStatus, GpuFault, RankFailures
from rljob_core.backend import ChildKey
from rljob_core.children.pods import avoided_by
from rljob_core.plan.validate import find_child_problems
from tests.support.job_simulation import START, JobSimulation, make_job

ECC = "CUDA error: uncorrectable ECC error encountered"
TRAINER, ROLLOUT = ChildKey("StatefulSet", "gsm8k-trainer"), ChildKey("Deployment", "gsm8k-rollout")
HEAD = ChildKey("Job", "gsm8k-head")


def make_pod(role, name, *, node="", address="", restarted="", message="", created=0):
    labels = {"rljob.dev/job": "gsm8k", "rljob.dev/role": role, "app.kubernetes.io/managed-by": "rljob-operator"}
    labels |= {"rljob.dev/reward": "correct"} if role == "reward" else {}
    ended = {"terminated": {"exitCode": 75, "message": message}} if message else {}
    containers = [{"name": role, "restartCount": int(bool(message)), "state": {"running": {}}, "lastState": ended}]
    at = (START + timedelta(seconds=created)).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": labels,
            "creationTimestamp": at,
            "annotations": {"rljob.dev/job-uid": "u1"} | ({"rljob.dev/restarted": restarted} if restarted else {}),
        },
        "spec": {"nodeName": node},
        "status": {
            "phase": "Running",
            "podIP": address,
            "conditions": [{"type": kind, "status": "True"} for kind in ("Ready", "ContainersReady")],
            "containerStatuses": containers,
        },
    }


def make_pods():
    return {
        "head": make_pod("head", "gsm8k-head-x", node="n0"),
        "trainer-0": make_pod("trainer", "gsm8k-trainer-0", node="n1", address="10.0.0.1"),
        "trainer-1": make_pod("trainer", "gsm8k-trainer-1", node="n2", address="10.0.0.2"),
        "rollout": make_pod("rollout", "gsm8k-rollout-a", node="n3", address="10.0.0.3"),
        "reward": make_pod("reward", "gsm8k-reward-correct-a", node="n4"),
    }


def simulate(**scheduling):
    job = make_job(
        trainer={"replicas": 2, "gpusPerReplica": 1},
        rollout={"replicas": 1, "gpusPerReplica": 1},
        scheduling=scheduling,
    )
    simulation = JobSimulation(job)
    simulation.reconcile(**make_pods())
    assert simulation.job.status.phase == "Running"
    return simulation


@pytest.fixture
def simulation():
    return simulate()


def report(address, at=60):
    fault = GpuFault(address=address, at=START + timedelta(seconds=at), message=f"GPU fault: {ECC}")
    return DriverStatus(rank_failures=RankFailures(count=1, last="a trainer rank failed", gpu_faults=[fault]))


def avoided_of(simulation, key):
    return avoided_by(simulation.children[key]["spec"]["template"]["spec"])


def recorded(simulation):
    return [(each.role, each.node, each.pod) for each in simulation.job.status.avoided_nodes]


def annotate(simulation, **annotations):
    metadata = simulation.job.metadata.model_copy(update={"annotations": annotations})
    simulation.job = simulation.job.model_copy(update={"metadata": metadata})


def test_trainers_avoid_the_node_that_the_driver_reports_and_others_stay(simulation):
    before = dict(simulation.children)
    simulation.driver = report("10.0.0.2")
    plan = simulation.reconcile()
    assert plan.requeue_after_seconds == 0, "the node is stored before anything is deleted"
    assert plan.delete == ()
    assert recorded(simulation) == [("trainer", "n2", "gsm8k-trainer-1")]
    assert simulation.reconcile().delete == (TRAINER,), "trainers start together: a group without one is of no use"
    simulation.reconcile()
    assert avoided_of(simulation, TRAINER) == ["n2"]
    assert find_child_problems(simulation.job, list(simulation.children.values())) == [], "Kubernetes takes it"
    assert {key: simulation.children[key] for key in (HEAD, ROLLOUT)} == {key: before[key] for key in (HEAD, ROLLOUT)}
    simulation.reconcile()
    assert simulation.writes == 0


def test_event_names_node_pod_and_what_to_do_once(simulation):
    simulation.driver = report("10.0.0.2")
    for _ in range(3):
        simulation.reconcile()
    [event] = [event for event in simulation.events if event.reason == "GpuFault"]
    assert event.type == "Warning"
    assert event.message == (
        f"trainer: node n2 has a broken GPU (Pod gsm8k-trainer-1: {ECC}); see kubectl describe node n2, and cordon or "
        "repair it; trainer avoids it until kubectl rljob restart --role trainer"
    )


def test_rollouts_avoid_the_node_that_a_container_of_theirs_reported(simulation):
    message = f"error: GPU fault: vLLM: {ECC}"
    simulation.reconcile(rollout=make_pod("rollout", "gsm8k-rollout-a", node="n3", message=message))
    simulation.reconcile()
    assert avoided_of(simulation, ROLLOUT) == ["n3"]
    assert avoided_of(simulation, TRAINER) == [], "each role has its own nodes"
    assert simulation.job.status.avoided_nodes[0].message == f"vLLM: {ECC}"


def test_pods_that_avoid_a_node_need_not_join_those_that_are_on_it():
    """On a topology of single nodes they never could, and the Deployment would wait for the first one."""
    pool = {"topology": {"key": "kubernetes.io/hostname"}}
    simulation = JobSimulation(make_job(rollout={"replicas": 2, "gpusPerReplica": 1, "nodePool": pool}))
    simulation.reconcile(**make_pods())
    old = simulation.children[ROLLOUT]["spec"]["template"]
    pod = make_pod("rollout", "gsm8k-rollout-a", node="n3", message=f"error: GPU fault: vLLM: {ECC}")
    for _ in range(2):
        simulation.reconcile(**make_pods() | {"rollout": pod})
    new = simulation.children[ROLLOUT]["spec"]["template"]
    selector = peer_selector(new)
    assert selector.items() <= new["metadata"]["labels"].items(), "a Pod satisfies its own term"
    assert not selector.items() <= old["metadata"]["labels"].items()
    assert peer_selector(old).items() <= old["metadata"]["labels"].items()
    deployment = simulation.children[ROLLOUT]["spec"]["selector"]["matchLabels"]
    assert deployment.items() <= old["metadata"]["labels"].items() & new["metadata"]["labels"].items()


def peer_selector(template):
    [term] = template["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    return term["labelSelector"]["matchLabels"]


def test_other_ends_of_a_container_avoid_nothing(simulation):
    message = "error: the rollout replica failed: CUDA error: an illegal memory access was encountered"
    simulation.reconcile(rollout=make_pod("rollout", "gsm8k-rollout-a", node="n3", message=message))
    assert recorded(simulation) == []


def test_new_pod_with_the_address_of_the_reported_one_is_not_the_reported_one(simulation):
    simulation.driver = report("10.0.0.2", at=60)
    pod = make_pod("trainer", "gsm8k-trainer-1", node="n9", address="10.0.0.2", created=61)
    simulation.reconcile(**{"trainer-1": pod})
    assert recorded(simulation) == []


@pytest.mark.parametrize("annotation", ["rljob.dev/restart", "rljob.dev/restart-trainer"])
def test_requested_restart_forgets_the_nodes_at_once_and_for_good(simulation, annotation):
    simulation.driver = report("10.0.0.2")
    for _ in range(3):
        simulation.reconcile()
    annotate(simulation, **{annotation: "r1"})
    simulation.reconcile()
    assert recorded(simulation) == [], "the Pod of before the restart is not counted again"
    simulation.reconcile()
    assert avoided_of(simulation, TRAINER) == []
    pod = make_pod("trainer", "gsm8k-trainer-1", node="n2", address="10.0.0.7", restarted="r1", created=100)
    simulation.reconcile(**{"trainer-1": pod})
    simulation.driver = report("10.0.0.7", at=200)
    simulation.reconcile()
    assert recorded(simulation) == [("trainer", "n2", "gsm8k-trainer-1")], "a new fault counts"


def test_suspension_forgets_the_nodes(simulation):
    simulation.driver = report("10.0.0.2")
    simulation.reconcile()
    spec = simulation.job.spec.model_copy(update={"suspend": True})
    simulation.job = simulation.job.model_copy(update={"spec": spec})
    simulation.reconcile()
    assert recorded(simulation) == []


def test_retry_forgets_the_nodes(simulation):
    simulation.driver = report("10.0.0.2")
    simulation.reconcile()
    failed = make_pod("trainer", "gsm8k-trainer-0", node="n1")
    ended = {"exitCode": 78, "message": "error: spec.trainer: wrong"}
    failed["status"]["containerStatuses"][0]["lastState"] = {"terminated": ended}
    simulation.reconcile(**{"trainer-0": failed})
    assert simulation.job.status.phase == "Failed"
    assert recorded(simulation) == [("trainer", "n2", "gsm8k-trainer-1")], "for the user who looks at the failure"
    simulation.driver = None
    annotate(simulation, **{"rljob.dev/retry": "1"})
    simulation.pods.clear()
    for _ in range(3):
        simulation.reconcile()
    assert recorded(simulation) == []
    assert avoided_of(simulation, TRAINER) == []


def test_record_is_bounded(simulation):
    for number in range(MAX_AVOIDED_NODES + 3):
        message = f"error: GPU fault: {ECC}"
        simulation.reconcile(rollout=make_pod("rollout", f"gsm8k-rollout-{number}", node=f"m{number}", message=message))
    assert len(recorded(simulation)) == MAX_AVOIDED_NODES


def test_pods_of_a_kueue_workload_keep_their_shape_and_the_node_is_reported():
    simulation = simulate(gang="kueue", queue="q")
    simulation.driver = report("10.0.0.2")
    for _ in range(3):
        simulation.reconcile()
    assert recorded(simulation) == [("trainer", "n2", "gsm8k-trainer-1")]
    assert avoided_of(simulation, TRAINER) == []
    [event] = [event for event in simulation.events if event.reason == "GpuFault"]
    assert "trainer may use it again" in event.message
