"""Lost nodes: what their Pods show, when the message is due, and which Pods are deleted by force."""

from datetime import timedelta

import pytest

from rljob_core.backend import ObservedState
from rljob_core.children import WORKLOAD_KINDS
from rljob_core.plan import conditions
from rljob_core.plan.job import plan_job
from rljob_core.plan.lost_nodes import NODE_LOST, NODE_UNREACHABLE, POD_STUCK, find_lost_pods, is_silent
from rljob_core.plan.observed_job import observe_job
from tests.support.job_simulation import START, JobSimulation, make_job

DECLARED_UNREADY = [{"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "True"}]
"""What the node controller leaves of a ready Pod (MarkPodsNotReady of Kubernetes 1.35)."""
BY_TAINT = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}


def make_pod(role, name, *, is_ready=True, deleted=None, node="n1", found=None, **metadata):
    """`deleted`: seconds from START to the end of the grace period of a Pod that is being deleted."""
    labels = {"rljob.dev/job": "gsm8k", "rljob.dev/role": role, "app.kubernetes.io/managed-by": "rljob-operator"}
    labels |= {"rljob.dev/reward": "correct"} if role == "reward" else {}
    if deleted is not None:
        end = (START + timedelta(seconds=deleted)).strftime("%Y-%m-%dT%H:%M:%SZ")
        metadata |= {"deletionTimestamp": end, "deletionGracePeriodSeconds": 60}
    found = found or [{"type": kind, "status": str(is_ready)} for kind in ("Ready", "ContainersReady")]
    return {
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels} | metadata,
        "spec": {"nodeName": node},
        "status": {"phase": "Running", "conditions": found},
    }


def make_pods():
    return {
        "head": make_pod("head", "gsm8k-head-x"),
        "trainer-0": make_pod("trainer", "gsm8k-trainer-0"),
        "trainer-1": make_pod("trainer", "gsm8k-trainer-1", node="n2"),
        "rollout": make_pod("rollout", "gsm8k-rollout-a"),
        "reward": make_pod("reward", "gsm8k-reward-correct-a"),
    }


@pytest.fixture
def simulation():
    return simulate()


def simulate(**scheduling):
    simulation = JobSimulation(make_job(trainer={"replicas": 2}, rollout={"replicas": 1}, scheduling=scheduling))
    simulation.reconcile(**make_pods())
    assert simulation.job.status.phase == "Running"
    return simulation


def lost_trainer(deleted, **details):
    return {"trainer-1": make_pod("trainer", "gsm8k-trainer-1", deleted=deleted, node="n2", **details)}


def message_of(simulation, type_="Restarting"):
    return conditions.find(simulation.job.status, type_).message


@pytest.mark.parametrize(
    ("found", "silent"),
    [
        (DECLARED_UNREADY, True),
        ([{"type": "Ready", "status": "False", "reason": "ContainersNotReady"}, DECLARED_UNREADY[1]], False),
        ([{"type": "Ready", "status": "False", "reason": "ReadinessGatesNotReady"}, DECLARED_UNREADY[1]], False),
        ([{"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "False"}], False),
        ([{"type": "Ready", "status": "True"}, {"type": "ContainersReady", "status": "True"}], False),
        ([], False),
    ],
)
def test_pod_whose_kubelet_is_silent_differs_from_an_unready_one(found, silent):
    assert is_silent(make_pod("trainer", "t", found=found) if found else {"metadata": {}, "status": {}}) == silent


def test_node_that_does_not_answer_is_named_before_its_pod_is_deleted(simulation):
    simulation.reconcile(**{"trainer-1": make_pod("trainer", "gsm8k-trainer-1", found=DECLARED_UNREADY, node="n2")})
    assert "trainer: node n2 of Pod gsm8k-trainer-1 is not ready or does not answer" in message_of(simulation)
    assert NODE_UNREACHABLE in {event.reason for event in simulation.events}
    simulation.reconcile()
    assert simulation.writes == 0


def test_pod_that_a_lost_node_keeps_is_named_with_its_node_and_the_remedy(simulation):
    made = simulation.reconcile(**lost_trainer(60, found=[*DECLARED_UNREADY, BY_TAINT]))
    assert "waits for 1 of 2 trainer Pods: gsm8k-trainer-1: being deleted" in message_of(simulation)
    assert NODE_LOST not in {event.reason for event in made.events}, "a kubelet may still confirm the end"
    made = simulation.reconcile(70)
    message = message_of(simulation)
    assert "trainer: Pod gsm8k-trainer-1 is stuck in Terminating on node n2, which does not answer" in message
    assert "kubectl taint nodes n2 node.kubernetes.io/out-of-service=nodeshutdown:NoExecute" in message
    assert "kubectl delete node n2; or set spec.scheduling.forceDeleteAfterSeconds" in message
    assert "not created yet" not in message
    assert NODE_LOST in {event.reason for event in made.events}
    assert made.force_delete == (), "never without the user's choice"
    simulation.reconcile(86_400)
    assert simulation.writes == 0, "the message of a day later is the same"


def test_message_is_due_when_the_plan_says(simulation):
    made = simulation.reconcile(**lost_trainer(65, found=DECLARED_UNREADY))
    simulation.reconcile()
    made = simulation.reconcile()
    assert made.valid_until == START + timedelta(seconds=75)
    simulation.reconcile(made.requeue_after_seconds)
    simulation.reconcile((made.valid_until - simulation.now).total_seconds())
    assert NODE_LOST in {event.reason for event in simulation.events}


@pytest.mark.parametrize(
    ("found", "problem", "margin"),
    [
        (DECLARED_UNREADY, NODE_LOST, 10),
        ([{"type": "Ready", "status": "True"}, BY_TAINT], NODE_LOST, 10),
        ([{"type": "Ready", "status": "True"}], POD_STUCK, 60),
    ],
)
def test_without_a_sign_of_its_node_a_stuck_pod_gets_more_time(found, problem, margin):
    pod = make_pod("trainer", "gsm8k-trainer-0", deleted=60, found=found)
    (lost,) = find_lost_pods(observe_job(make_job(), ObservedState(pods=(pod,))))
    assert (lost.problem, lost.since) == (problem, START + timedelta(seconds=60 + margin))
    assert "Pod gsm8k-trainer-0 is stuck in Terminating on node n1" in lost.cause.message


def test_pods_of_one_node_and_role_share_a_message():
    pods = [make_pod("trainer", f"gsm8k-trainer-{i}", deleted=i, found=DECLARED_UNREADY) for i in range(8)]
    head = make_pod("head", "gsm8k-head-x", deleted=5, found=DECLARED_UNREADY)
    observed = observe_job(make_job(trainer={"replicas": 8}), ObservedState(pods=(*pods, head)))
    of_head, of_trainers = find_lost_pods(observed)
    assert of_head.cause.message.startswith("head: Pod gsm8k-head-x is stuck")
    assert "trainer: Pods gsm8k-trainer-0, gsm8k-trainer-1, gsm8k-trainer-2, gsm8k-trainer-3, ... are stuck" in (
        of_trainers.cause.message
    )
    assert of_trainers.since == START + timedelta(seconds=10), "the first of them"


@pytest.mark.parametrize("role", ["rollout", "reward"])
def test_replaced_pod_of_a_deployment_is_not_reported(simulation, role):
    simulation.reconcile(1000, **{"old": make_pod(role, "gsm8k-old", deleted=0, found=DECLARED_UNREADY)})
    assert conditions.find(simulation.job.status, "Running").message == "all Pods are ready"


def test_pod_is_deleted_by_force_only_after_the_chosen_time():
    simulation = simulate(forceDeleteAfterSeconds=20)
    made = simulation.reconcile(**lost_trainer(62, found=DECLARED_UNREADY))
    assert made.force_delete == ()
    simulation.reconcile(58)
    made = simulation.reconcile(21)
    assert made.force_delete == ()
    assert made.requeue_after_seconds == 1.0
    assert "spec.scheduling.forceDeleteAfterSeconds (20 s) deletes it by force" in message_of(simulation)
    made = simulation.reconcile()
    assert [(deletion.pod, deletion.node) for deletion in made.force_delete] == [("gsm8k-trainer-1", "n2")]


def test_head_that_a_user_deleted_by_force_is_reported_as_failed_too():
    """Its Job waits for the phase Failed, which no kubelet reports."""
    pod = make_pod("head", "gsm8k-head-x", deleted=0)
    pod["metadata"] |= {"deletionGracePeriodSeconds": 0, "finalizers": ["batch.kubernetes.io/job-tracking"]}
    job = make_job(scheduling={"forceDeleteAfterSeconds": 10})
    (deletion,) = plan_job(job, ObservedState(pods=(pod,)), START + timedelta(seconds=10)).force_delete
    assert deletion.pod == "gsm8k-head-x"


def test_pod_of_others_is_left_alone():
    pod = make_pod("trainer", "gsm8k-trainer-1", deleted=0)
    pod["metadata"]["labels"] = {"rljob.dev/job": "gsm8k", "rljob.dev/role": "trainer"}
    job = make_job(trainer={"replicas": 2}, scheduling={"forceDeleteAfterSeconds": 10})
    assert plan_job(job, ObservedState(pods=(pod,)), START + timedelta(days=1)).force_delete == ()


@pytest.mark.parametrize(("grace_seconds", "is_deleted"), [(60, True), (0, False)])
def test_forced_deletion_that_was_interrupted_is_completed(grace_seconds, is_deleted):
    """A Pod that is reported as failed but still has a grace period; without one, only its finalizers keep it."""
    pod = make_pod("trainer", "gsm8k-trainer-1", deleted=0)
    pod["metadata"]["deletionGracePeriodSeconds"] = grace_seconds
    pod["status"]["phase"] = "Failed"
    job = make_job(trainer={"replicas": 2}, scheduling={"forceDeleteAfterSeconds": 10})
    made = plan_job(job, ObservedState(pods=(pod,)), START + timedelta(days=1))
    assert bool(made.force_delete) == is_deleted


def test_choice_restarts_no_running_pod(simulation):
    """Only the Pods of a later start tolerate a lost node for less time."""
    simulation.reconcile()
    before = {key: child["spec"] for key, child in simulation.children.items() if key.kind in WORKLOAD_KINDS}
    simulation.job.spec.scheduling.force_delete_after_seconds = 20
    simulation.job.metadata.generation = 2
    simulation.reconcile()
    assert before == {key: child["spec"] for key, child in simulation.children.items() if key.kind in WORKLOAD_KINDS}


def test_suspended_job_loses_its_lost_pods_too():
    """A workload is deleted after its Pods: a resumed job would wait for the old one."""
    simulation = simulate(forceDeleteAfterSeconds=20)
    simulation.job.spec.suspend = True
    made = simulation.reconcile(**lost_trainer(60))
    assert (simulation.job.status.phase, made.requeue_after_seconds) == ("Suspended", 78.0)
    assert [deletion.pod for deletion in simulation.reconcile(78).force_delete] == ["gsm8k-trainer-1"]


def test_lost_pod_that_blocks_the_deletion_of_its_workload_is_named(simulation):
    simulation.reconcile(**{"head": make_pod("head", "gsm8k-head-x", deleted=0, found=DECLARED_UNREADY)})
    key = next(key for key in simulation.children if key.kind == "Job")
    simulation.children[key]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    simulation.reconcile(60)
    assert "waits until an earlier Job gsm8k-head is deleted; head: Pod gsm8k-head-x is stuck" in (
        message_of(simulation)
    )
