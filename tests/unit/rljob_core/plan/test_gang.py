"""Gangs: scheduling gates, the timeout that releases nodes, and what a running job keeps."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.manifest.scaling import Autoscaling
from rljob_api.wire.contract import SCHEDULING_GATE
from rljob_core.children import WORKLOAD_KINDS
from rljob_core.plan import conditions
from rljob_core.plan.gang import choose_rest_seconds
from rljob_core.plan.validate import find_problems
from tests.support.job_simulation import START, JobSimulation, make_job

GATE = [{"name": SCHEDULING_GATE}]
ROLES = {"head": 1, "trainer": 1, "rollout": 2, "reward": 1}


def make_gang(gang="gates", **scheduling):
    return make_job(rollout={"replicas": 2}, scheduling={"gang": gang, "timeoutSeconds": 100} | scheduling)


def simulate(gang="gates", **scheduling):
    return JobSimulation(make_gang(gang, **scheduling), deletes_pods=True)


def make_pod(role, index, stage):
    """`stage` is gated, pending, placed or ready."""
    labels = {"rljob.dev/job": "gsm8k", "rljob.dev/role": role}
    labels |= {"rljob.dev/reward": "correct"} if role == "reward" else {}
    spec = {"schedulingGates": GATE} if stage == "gated" else {}
    spec |= {"nodeName": f"n-{role}"} if stage in ("placed", "ready") else {}
    ready = [{"type": "Ready", "status": str(stage == "ready")}]
    return {"metadata": {"name": f"{role}-{index}", "labels": labels}, "spec": spec, "status": {"conditions": ready}}


def make_pods(stage, roles=ROLES):
    return {f"{r}-{i}": make_pod(r, i, stage) for r, n in roles.items() for i in range(n)}


def queued(simulation):
    return conditions.find(simulation.job.status, "Queued")


def test_gates_open_only_when_all_pods_exist():
    simulation = simulate()
    simulation.reconcile()
    simulation.pods = make_pods("gated", ROLES | {"rollout": 1})
    made = simulation.reconcile()
    assert (made.ungate, simulation.job.status.phase) == ((), "Queued")
    assert queued(simulation).message == "4 of 5 Pods exist"
    simulation.pods = make_pods("gated")
    assert len(simulation.reconcile().ungate) == 5


def test_incomplete_gang_releases_its_nodes_and_retries():
    simulation = simulate()
    simulation.reconcile()
    simulation.pods = make_pods("placed", ROLES | {"rollout": 1})
    simulation.reconcile(99)
    assert simulation.has_workloads()
    made = simulation.reconcile(1)
    assert not simulation.has_workloads(), "an incomplete gang releases its nodes"
    assert (queued(simulation).reason, simulation.job.status.phase) == ("TimedOut", "Queued")
    assert made.requeue_after_seconds <= 100
    rest = (simulation.job.status.not_before - simulation.now).total_seconds()
    assert 50 <= rest <= 100
    simulation.reconcile()  # the Pods are deleted, and the message changes
    simulation.reconcile()
    assert simulation.writes == 0, "nothing to write while it backs off"
    simulation.reconcile(rest - 3)
    assert not simulation.has_workloads()
    simulation.reconcile()
    assert simulation.has_workloads()
    assert queued(simulation).reason == "WaitingForPods"


def test_waits_of_jobs_that_compete_do_not_stay_in_step():
    """Two jobs that time out at the same moment try again at different times, and again the next time."""
    jobs = [make_gang() for _ in range(20)]
    for number, job in enumerate(jobs):
        job.metadata.uid = f"u{number}"
    for attempt in range(4):
        now = START + timedelta(seconds=200 * attempt)
        waits = [choose_rest_seconds(job, now) for job in jobs]
        assert waits == [choose_rest_seconds(job, now) for job in jobs], "the same for the same attempt"
        assert min(waits) >= 50
        assert max(waits) <= 100
        assert len(set(waits)) > 10
    assert choose_rest_seconds(jobs[0], START) != choose_rest_seconds(jobs[0], START + timedelta(seconds=200))


def test_replacement_pod_of_a_running_job_starts_at_once():
    simulation = simulate()
    simulation.reconcile()
    simulation.pods = make_pods("ready")
    simulation.reconcile()
    assert simulation.job.status.phase == "Running"
    assert queued(simulation).status == "False"
    simulation.pods["rollout-1"] = make_pod("rollout", 1, "gated")
    del simulation.pods["reward-0"]
    assert simulation.reconcile(1000).ungate == ("rollout-1",)
    assert simulation.has_workloads(), "the timeout applies only to a start"


def test_backoff_written_by_a_clock_far_ahead_is_ignored():
    simulation = simulate()
    simulation.job.status.not_before = START + timedelta(days=1)
    simulation.reconcile()
    assert simulation.has_workloads()


@pytest.mark.parametrize("later", ["none", "kueue"])
def test_changed_gang_restarts_no_running_pod(later):
    simulation = simulate()
    simulation.reconcile()
    simulation.pods = make_pods("ready")
    simulation.reconcile()
    before = {key: c["spec"]["template"] for key, c in simulation.children.items() if key.kind in WORKLOAD_KINDS}
    simulation.job.spec.scheduling = make_gang(later, **({"queue": "q"} if later == "kueue" else {})).spec.scheduling
    simulation.reconcile()
    assert before == {
        key: c["spec"]["template"] for key, c in simulation.children.items() if key.kind in WORKLOAD_KINDS
    }


def test_kueue_without_queue_is_rejected():
    assert find_problems(make_gang("kueue")) == [
        "spec.scheduling.queue must be set for gang: kueue; name a LocalQueue of the job's namespace"
    ]
    assert len(find_problems(make_gang("gates", queue="q"))) == 1


def test_wait_for_kueue_quota_never_times_out():
    simulation = simulate("kueue", queue="research")
    simulation.reconcile()
    simulation.pods = make_pods("pending")
    for pod in simulation.pods.values():
        pod["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
    simulation.reconcile()
    simulation.reconcile(100_000)
    assert simulation.has_workloads(), "the timeout applies to nodes, not to quota"
    assert (queued(simulation).status, queued(simulation).reason) == ("True", "WaitingForQuota")
    assert "queue research has not admitted the job" in queued(simulation).message
    simulation.pods = make_pods("pending")
    simulation.reconcile()
    simulation.reconcile(99)
    assert queued(simulation).reason == "WaitingForNodes"
    simulation.reconcile(1)
    assert not simulation.has_workloads(), "once admitted, the group must be placed in time"


def test_gang_under_kueue_does_not_wait_for_autoscaled_rewards():
    job = make_gang("kueue", queue="q")
    job.spec.rewards[0].autoscaling = Autoscaling(max_replicas=4)
    simulation = JobSimulation(job, deletes_pods=True)
    simulation.reconcile()
    simulation.pods = make_pods("ready") | {"reward-0": with_kueue_gates({"p": make_pod("reward", 0, "pending")})["p"]}
    simulation.reconcile()
    assert queued(simulation).status == "False", "the group is complete"
    assert simulation.job.status.phase == "Pending", "its own Pod waits for quota"
    simulation.reconcile(1000)
    assert simulation.has_workloads()
    simulation.pods = make_pods("ready")
    simulation.reconcile()
    assert simulation.job.status.phase == "Running"


def test_deadline_does_not_pass_while_a_job_is_queued_or_backs_off():
    simulation = simulate("kueue", queue="research")
    simulation.job.spec.active_deadline_seconds = 1000
    simulation.reconcile()
    simulation.pods = with_kueue_gates(make_pods("pending"))
    simulation.reconcile(100_000)
    assert queued(simulation).reason == "WaitingForQuota"
    simulation.pods = make_pods("pending")
    simulation.reconcile()
    simulation.reconcile(100)
    assert queued(simulation).reason == "TimedOut"
    simulation.reconcile(40)
    assert simulation.job.status.active_since is None
    simulation.reconcile(100)
    simulation.pods = make_pods("ready")
    simulation.reconcile()
    simulation.reconcile(999)
    assert simulation.job.status.phase == "Running"
    simulation.reconcile(1)
    assert conditions.find(simulation.job.status, "Failed").reason == "DeadlineExceeded"


def test_preempted_job_is_queued_and_its_deadline_does_not_pass():
    """Kueue deletes the Pods of a job that it preempts, and gates those that replace them."""
    simulation = simulate("kueue", queue="research")
    simulation.job.spec.active_deadline_seconds = 1000
    simulation.reconcile()
    simulation.pods = make_pods("ready")
    simulation.reconcile()
    simulation.pods["rollout-1"] = with_kueue_gates({"p": make_pod("rollout", 1, "pending")})["p"]
    simulation.reconcile(400)
    assert simulation.job.status.phase == "Running", "the group is admitted: Kueue opens the gate at once"
    simulation.pods = with_kueue_gates(make_pods("pending"))
    simulation.reconcile()
    assert (simulation.job.status.phase, queued(simulation).reason) == ("Queued", "WaitingForQuota")
    simulation.reconcile(100_000)
    assert simulation.job.status.phase == "Queued"
    assert simulation.has_workloads(), "it keeps its place in the queue"
    simulation.pods = make_pods("pending")
    simulation.reconcile()
    assert simulation.job.status.phase == "Restarting"
    simulation.reconcile(590)
    assert simulation.job.status.phase == "Restarting"
    simulation.reconcile(10)
    assert conditions.find(simulation.job.status, "Failed").reason == "DeadlineExceeded"


def with_kueue_gates(pods):
    for pod in pods.values():
        pod["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
    return pods


STAGES = st.sampled_from(["missing", "gated", "pending", "placed", "ready"])


@given(
    st.sampled_from(["none", "gates"]),
    st.lists(st.tuples(st.lists(STAGES, min_size=5, max_size=5), st.integers(1, 120)), min_size=1, max_size=5),
)
def test_repeated_reconcile_writes_nothing_and_no_gate_opens_early(gang, history):
    simulation = simulate(gang)
    names = [(r, i) for r, n in ROLES.items() for i in range(n)]
    for stages, seconds in history:
        if simulation.has_workloads():
            simulation.pods = {
                f"{r}-{i}": make_pod(r, i, s) for (r, i), s in zip(names, stages, strict=True) if s != "missing"
            }
        was_running = simulation.job.status.phase in ("Running", "Restarting")
        missing = len(simulation.pods) < 5
        made = simulation.reconcile(seconds)
        assert not (gang == "gates" and missing and not was_running and made.ungate)
        for _ in range(3):
            simulation.reconcile(0)
        assert simulation.writes == 0
