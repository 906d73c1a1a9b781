"""All Pods or none: gates, the time-out that gives nodes back, and what a running job keeps."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.manifest.job import RLJob
from rljob_api.wire.contract import SCHEDULING_GATE
from rljob_operator.backend import ObservedState, key_of
from rljob_operator.children import WORKLOAD_KINDS
from rljob_operator.children.difference import contains, stamp
from rljob_operator.plan import conditions
from rljob_operator.plan.job import plan_job
from rljob_operator.plan.validate import find_problems

START = datetime(2026, 1, 1, tzinfo=UTC)
GATE = [{"name": SCHEDULING_GATE}]
ROLES = {"head": 1, "trainer": 1, "rollout": 2, "reward": 1}


def make_job(gang="gates", **scheduling):
    return RLJob.model_validate(
        {
            "metadata": {"name": "gsm8k", "uid": "u1"},
            "spec": {
                "model": {"source": "/m"},
                "data": {"train": {"source": "/d.jsonl"}},
                "rewards": [{"name": "correct", "function": {"inline": "def reward(): ..."}}],
                "rollout": {"replicas": 2},
                "scheduling": {"gang": gang, "timeoutSeconds": 100} | scheduling,
            },
        }
    )


def make_pod(role, index, stage):
    """stage: gated, pending, placed or ready."""
    labels = {"rljob.dev/job": "gsm8k", "rljob.dev/role": role}
    labels |= {"rljob.dev/reward": "correct"} if role == "reward" else {}
    spec = {"schedulingGates": GATE} if stage == "gated" else {}
    spec |= {"nodeName": f"n-{role}"} if stage in ("placed", "ready") else {}
    ready = [{"type": "Ready", "status": str(stage == "ready")}]
    return {"metadata": {"name": f"{role}-{index}", "labels": labels}, "spec": spec, "status": {"conditions": ready}}


def make_pods(stage, roles=ROLES):
    return {f"{r}-{i}": make_pod(r, i, stage) for r, n in roles.items() for i in range(n)}


class World:
    """A job whose plan is applied to the objects that are there."""

    def __init__(self, job):
        self.job, self.now, self.children, self.pods = job, START, {}, {}

    def look(self, seconds=1):
        self.now += timedelta(seconds=seconds)
        made = plan_job(
            self.job, ObservedState(self.children, tuple(self.pods.values())), self.now, new_token=lambda: "t"
        )
        self.writes = sum(not contains(self.children.get(key_of(c)), stamp(c)) for c in made.children)
        self.writes += len(made.delete) + len(made.ungate) + (made.status != self.job.status)
        self.children |= {key_of(child): stamp(child) for child in made.children}
        for key in made.delete:
            self.children.pop(key)
        if not any(key.kind in WORKLOAD_KINDS for key in self.children):
            self.pods.clear()
        for name in made.ungate:
            self.pods[name] = self.pods[name] | {"spec": {}}
        self.job = self.job.model_copy(update={"status": made.status})
        return made

    def queued(self):
        return conditions.find(self.job.status, "Queued")


def has_workloads(world):
    return any(key.kind in WORKLOAD_KINDS for key in world.children)


def test_gates_open_only_when_all_pods_exist():
    world = World(make_job())
    world.look()
    world.pods = make_pods("gated", ROLES | {"rollout": 1})
    made = world.look()
    assert (made.ungate, world.job.status.phase) == ((), "Queued")
    assert world.queued().message == "4 of 5 Pods exist"
    world.pods = make_pods("gated")
    assert len(world.look().ungate) == 5


def test_a_job_that_is_not_whole_in_time_gives_its_nodes_back_and_tries_again():
    world = World(make_job())
    world.look()
    world.pods = make_pods("placed", ROLES | {"rollout": 1})
    world.look(99)
    assert has_workloads(world)
    made = world.look(1)
    assert not has_workloads(world), "half a job holds no nodes"
    assert (world.queued().reason, world.job.status.phase) == ("TimedOut", "Queued")
    assert made.requeue_after_seconds <= 50
    world.look()  # the Pods are gone, and the words about them change
    world.look()
    assert world.writes == 0, "nothing to write while it rests"
    world.look(48)
    assert has_workloads(world)
    assert world.queued().reason == "WaitingForPods"


def test_a_replaced_pod_of_a_running_job_starts_at_once():
    world = World(make_job())
    world.look()
    world.pods = make_pods("ready")
    world.look()
    assert world.job.status.phase == "Running"
    assert world.queued().status == "False"
    world.pods["rollout-1"] = make_pod("rollout", 1, "gated")
    del world.pods["reward-0"]
    assert world.look(1000).ungate == ("rollout-1",)
    assert has_workloads(world), "the time-out is for a start alone"


def test_a_rest_that_a_clock_far_ahead_has_written_is_over():
    world = World(make_job())
    world.job.status.not_before = START + timedelta(days=1)
    world.look()
    assert has_workloads(world)


@pytest.mark.parametrize("later", ["none", "volcano", "coscheduling", "kueue"])
def test_another_gang_rolls_no_running_pod(later):
    world = World(make_job())
    world.look()
    world.pods = make_pods("ready")
    world.look()
    before = {key: c["spec"]["template"] for key, c in world.children.items() if key.kind in WORKLOAD_KINDS}
    world.job.spec.scheduling = make_job(later, **({"queue": "q"} if later == "kueue" else {})).spec.scheduling
    world.look()
    assert before == {key: c["spec"]["template"] for key, c in world.children.items() if key.kind in WORKLOAD_KINDS}


@pytest.mark.parametrize(
    ("gang", "labels", "annotations", "scheduler", "group"),
    [
        ("volcano", {}, {"scheduling.k8s.io/group-name": "gsm8k"}, "volcano", "scheduling.volcano.sh/v1beta1"),
        (
            "coscheduling",
            {"scheduling.x-k8s.io/pod-group": "gsm8k"},
            {},
            "scheduler-plugins-scheduler",
            "scheduling.x-k8s.io/v1alpha1",
        ),
        (
            "kueue",
            {"kueue.x-k8s.io/queue-name": "q", "kueue.x-k8s.io/pod-group-name": "gsm8k"},
            {"kueue.x-k8s.io/pod-group-total-count": "5"},
            None,
            None,
        ),
    ],
)
def test_each_scheduler_gets_the_group_that_it_reads(gang, labels, annotations, scheduler, group):
    made = World(make_job(gang, **({"queue": "q"} if gang != "coscheduling" else {}))).look()
    for child in made.children:
        if child["kind"] in WORKLOAD_KINDS:
            template = child["spec"]["template"]
            assert labels.items() <= template["metadata"]["labels"].items()
            assert annotations.items() <= template["metadata"]["annotations"].items()
            assert template["spec"].get("schedulerName") == scheduler
            assert "schedulingGates" not in template["spec"]
    groups = [(c["apiVersion"], c["spec"]["minMember"]) for c in made.children if c["kind"] == "PodGroup"]
    assert groups == ([(group, 5)] if group else [])


def test_kueue_without_a_queue_is_refused_with_the_remedy():
    assert find_problems(make_job("kueue")) == [
        "spec.scheduling.queue must be set for gang: kueue; name a LocalQueue of the job's namespace"
    ]
    assert len(find_problems(make_job("gates", queue="q"))) == 1


def test_a_job_that_waits_in_kueues_queue_keeps_its_place_however_long_it_takes():
    world = World(make_job("kueue", queue="research"))
    world.look()
    world.pods = make_pods("pending")
    for pod in world.pods.values():
        pod["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
    world.look()
    world.look(100_000)
    assert has_workloads(world), "the time-out is for nodes, not for quota"
    assert (world.queued().status, world.queued().reason) == ("True", "WaitingForQuota")
    assert "queue research has not admitted the job" in world.queued().message
    world.pods = make_pods("pending")
    world.look()
    world.look(99)
    assert world.queued().reason == "WaitingForNodes"
    world.look(1)
    assert not has_workloads(world), "admitted, the group must find its nodes in time"


STAGES = st.sampled_from(["gone", "gated", "pending", "placed", "ready"])


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["none", "gates", "volcano"]),
    st.lists(st.tuples(st.lists(STAGES, min_size=5, max_size=5), st.integers(1, 120)), min_size=1, max_size=5),
)
def test_in_any_world_a_second_look_writes_nothing_and_no_gate_opens_early(gang, history):
    world = World(make_job(gang))
    names = [(r, i) for r, n in ROLES.items() for i in range(n)]
    for stages, seconds in history:
        if has_workloads(world):
            world.pods = {f"{r}-{i}": make_pod(r, i, s) for (r, i), s in zip(names, stages, strict=True) if s != "gone"}
        was_up = world.job.status.phase in ("Running", "Restarting")
        missing = len(world.pods) < 5
        made = world.look(seconds)
        assert not (gang == "gates" and missing and not was_up and made.ungate)
        for _ in range(3):
            world.look(0)
        assert world.writes == 0
