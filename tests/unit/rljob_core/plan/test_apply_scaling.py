"""Autoscaled rewards in plans: replicas, status, events and when to reconcile again."""

from datetime import UTC, datetime, timedelta

import pytest
import yaml

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.services.reward import RewardModel
from rljob_api.wire.contract import LABEL_REWARD, LABEL_ROLE
from rljob_api.wire.driver_status import DriverStatus, RewardDemand
from rljob_core.backend import PROGRESS_POLL_SECONDS, ChildKey, Demand, ObservedState, key_of
from rljob_core.plan.apply_scaling import measure_startup_seconds, read_demands, scale_job
from rljob_core.plan.job import plan_job
from rljob_core.plan.reward_model import plan_reward_model
from tests.paths import ROOT

DATA = ROOT / "tests" / "data" / "plan"
NOW = datetime(2026, 1, 2, tzinfo=UTC)
BURST = RewardDemand(
    samples=640, expected=640, is_open=True, due_seconds=40.0, window_seconds=40.0, latency_seconds=4.0
)
IDLE = RewardDemand()
SCORE = {"function": {"inline": "def compute_score(data_source, solution_str, ground_truth): return 1.0\n"}}


def make_job(**fields):
    manifest = yaml.safe_load((DATA / "smallest" / "job.yaml").read_text())
    manifest["metadata"] |= {"uid": "u"}
    scaling = {"minReplicas": 0, "maxReplicas": 50}
    manifest["spec"]["rewards"] = [{"name": "correct", "autoscaling": scaling, **SCORE, **fields}]
    return RLJob.model_validate(manifest)


def make_pod(role, name="p", phase="Running", **labels):
    return {
        "kind": "Pod",
        "metadata": {"name": name, "uid": name, "labels": {LABEL_ROLE: role, **labels}, "annotations": {}},
        "status": {"phase": phase, "podIP": "10.0.0.1", "conditions": []},
    }


HEAD = make_pod("head")


def at(seconds):
    return NOW + timedelta(seconds=seconds)


def reconcile(job, demand=None, seconds=0.0, pods=(HEAD,)):
    """Reconcile once. Returns the plan and the job with its stored status."""
    driver = None if demand is None else DriverStatus(phase="generate", demand={"correct": demand})
    made = plan_job(job, ObservedState(pods=pods, driver=driver), at(seconds), new_token=lambda: "t")
    return made, job.model_copy(update={"status": made.status})


def replicas_of(made, name="gsm8k-reward-correct"):
    return next(c for c in made.children if key_of(c) == ChildKey("Deployment", name))["spec"]["replicas"]


def reasons(made):
    return [event.reason for event in made.events if event.reason.startswith("Scaled")]


def test_reward_has_min_replicas_before_a_driver_exists():
    made, job = reconcile(make_job(), pods=())
    assert (replicas_of(made), job.status.scaling[0].replicas, reasons(made)) == (0, 0, [])


def test_replicas_scale_up_before_the_burst_and_status_explains_why():
    _, job = reconcile(make_job(), pods=())
    made, job = reconcile(job, BURST)
    assert replicas_of(made) == 5
    [record] = job.status.scaling
    assert (record.name, record.replicas, record.slots, record.samples) == ("correct", 5, 80, 640)
    assert record.message == "wants 5: 640 samples x 4 s / 32 s = 80 slots of 16"
    assert [event.message for event in made.events if event.reason == "ScaledUp"] == [
        "reward correct from 0 to 5 Pods: wants 5: 640 samples x 4 s / 32 s = 80 slots of 16"
    ]
    assert next(role for role in job.status.roles if role.name == "reward-correct").desired == 5
    assert job.status.rewards == "0/5"


def test_unchanged_demand_writes_nothing_during_a_step():
    _, job = reconcile(make_job(), BURST)
    for seconds in range(2, 200, 2):
        going = BURST.model_copy(update={"expected": max(1, 640 - 4 * seconds), "elapsed_seconds": seconds / 10})
        made, after = reconcile(job, going, seconds)
        assert (after.status, reasons(made)) == (job.status, [])


def test_scale_up_changes_only_the_replicas_of_the_deployment_and_adds_its_budget():
    before, job = reconcile(make_job(), IDLE)
    made, _ = reconcile(job, BURST)
    old, new = ({key_of(c): c for c in which.children} for which in (before, made))
    changed = [key for key in old if new[key] != old[key]]
    assert changed == [ChildKey("Deployment", "gsm8k-reward-correct")]
    assert new.keys() - old.keys() == {ChildKey("PodDisruptionBudget", "gsm8k-reward-correct")}
    assert new[changed[0]]["spec"]["template"] == old[changed[0]]["spec"]["template"]


def test_changed_autoscaling_settings_restart_no_pod():
    made, other = reconcile(make_job(), BURST)[0], reconcile(make_job(autoscaling={"maxReplicas": 3}), BURST)[0]
    old, new = ({key_of(c): c for c in which.children} for which in (made, other))
    for key, child in new.items():
        if key.kind in ("Deployment", "Job", "StatefulSet"):
            assert child["spec"]["template"] == old[key]["spec"]["template"], key


def test_job_is_not_restarting_while_scaled_up_pods_start():
    job = make_job()
    _, job = reconcile(job, IDLE)
    running = [c.model_copy(update={"status": "True"}) if c.type == "Running" else c for c in job.status.conditions]
    job = job.model_copy(update={"status": job.status.model_copy(update={"conditions": running})})
    ready = {"conditions": [{"type": "Ready", "status": "True"}], "phase": "Running", "podIP": "10.0.0.1"}
    pods = tuple(make_pod(role, role) | {"status": ready} for role in ("head", "trainer"))
    pods += tuple(make_pod("rollout", f"rollout-{i}") | {"status": ready} for i in range(job.spec.rollout.replicas))
    made, _ = reconcile(job, BURST, pods=pods)
    states = {condition.type: condition.status for condition in made.status.conditions}
    assert (states["Running"], states["Restarting"]) == ("True", "False")


def test_driver_is_polled_often_when_a_burst_is_near():
    assert reconcile(make_job(), BURST)[0].requeue_after_seconds == 2.0
    far = BURST.model_copy(update={"is_open": False, "starts_in_seconds": 90.0})
    assert reconcile(make_job(), far)[0].requeue_after_seconds == PROGRESS_POLL_SECONDS
    fixed = make_job(autoscaling=None)
    assert reconcile(fixed, BURST)[0].requeue_after_seconds == PROGRESS_POLL_SECONDS


def test_replicas_stay_for_silent_driver_and_fall_without_head():
    _, job = reconcile(make_job(), BURST)
    assert replicas_of(reconcile(job, None, 10_000)[0]) == 5
    _, job = reconcile(job, None, 0, pods=())
    assert replicas_of(reconcile(job, None, 301, pods=())[0]) == 0


def test_suspended_job_drops_records_and_finished_job_keeps_them():
    _, job = reconcile(make_job(), BURST)
    suspended = job.with_spec(suspend=True)
    assert reconcile(suspended, None)[1].status.scaling == []
    ended = [c.model_copy(update={"status": "True"}) if c.type == "Succeeded" else c for c in job.status.conditions]
    job = job.model_copy(update={"status": job.status.model_copy(update={"conditions": ended})})
    assert scale_job(job, ObservedState(), at(10_000))[0] == job


def test_fixed_replicas_stay_and_drop_earlier_records():
    fixed = make_job(autoscaling=None, replicas=3)
    assert scale_job(fixed, ObservedState(driver=DriverStatus(demand={"correct": BURST})), NOW)[0] == fixed
    _, job = reconcile(make_job(), BURST)
    spec = job.spec.model_copy(update={"rewards": fixed.spec.rewards})
    assert reconcile(job.model_copy(update={"spec": spec}), BURST)[1].status.scaling == []


@pytest.mark.parametrize(("seconds", "lead"), [([], 60), ([30, 40, 50], 40), ([1], 10), ([5000], 900)])
def test_startup_time_is_measured_from_ready_pods(seconds, lead):
    pods = []
    for number in seconds:
        pod = make_pod("reward", f"r{number}", **{LABEL_REWARD: "correct"})
        pod["metadata"]["creationTimestamp"] = "2026-01-02T00:00:00Z"
        ready = f"{at(number):%Y-%m-%dT%H:%M:%SZ}"
        pod["status"]["conditions"] = [{"type": "Ready", "status": "True", "lastTransitionTime": ready}]
        pods.append(pod)
    assert measure_startup_seconds([*pods, make_pod("reward", "unready")]) == lead


# ---- users, tools and runners ----

SCALING = {"minReplicas": 0, "maxReplicas": 50, "scaleDownAfterSeconds": 20}
SOURCE = {"inline": "def add(a: int) -> int: return a\n"}
LOOP = {
    "type": "loop",
    "user": {"function": SOURCE, "autoscaling": SCALING},
    "tools": [
        {"name": "calc", "function": SOURCE, "autoscaling": SCALING},
        {"name": "fixed", "function": SOURCE, "replicas": 2},
    ],
}
PROGRAM = {"type": "program", "runner": {"command": ["python", "a.py"], "autoscaling": SCALING}}
EPISODES = RewardDemand(samples=64, expected=64, is_open=True, holds_slots=True)
AT_ONCE = "wants 4: 64 episodes at once = 64 slots of 16"
CALLS = RewardDemand(samples=640, expected=3, is_open=True, due_seconds=40, window_seconds=40.0, latency_seconds=4.0)
IN_CALLS = "wants 5: 640 episodes x 4 s / 32 s = 80 slots of 16"


def make_agent_job(agent, **fields):
    manifest = make_job().to_manifest()
    manifest["spec"] |= {"agent": agent, "rewards": [{"name": "correct", **SCORE}], **fields}
    manifest["spec"]["data"]["format"] = "chat"
    return RLJob.model_validate(manifest)


def reconcile_agent(job, demands=None, seconds=0.0, pods=(HEAD,)):
    driver = None if demands is None else DriverStatus(phase="generate", demand=demands)
    made = plan_job(job, ObservedState(pods=pods, driver=driver), at(seconds), new_token=lambda: "t")
    return made, job.model_copy(update={"status": made.status})


@pytest.mark.parametrize(
    ("agent", "name", "wanted", "event", "replicas"),
    [
        (LOOP, "user", CALLS, f"user from 0 to 5 Pods: {IN_CALLS}", 5),
        (LOOP, "calc", CALLS, f"tool calc from 0 to 5 Pods: {IN_CALLS}", 5),
        (PROGRAM, "runner", EPISODES, f"runner from 0 to 4 Pods: {AT_ONCE}", 4),
    ],
)
def test_services_of_an_agent_scale_from_zero_and_back(agent, name, wanted, event, replicas):
    made, job = reconcile_agent(make_agent_job(agent), pods=())
    service = f"gsm8k-agent-{name}"
    assert (replicas_of(made, service), reasons(made)) == (0, [])
    made, job = reconcile_agent(job, {name: wanted})
    assert replicas_of(made, service) == replicas
    assert [each.message for each in made.events if each.reason == "ScaledUp"] == [event]
    assert next(role for role in job.status.roles if role.name == f"agent-{name}").desired == replicas
    assert {record.name: record.replicas for record in job.status.scaling}[name] == replicas
    assert made.requeue_after_seconds == 2.0
    _, job = reconcile_agent(job, {}, 10)
    made, job = reconcile_agent(job, {}, 31)
    assert (replicas_of(made, service), reasons(made)) == (0, ["ScaledDown"])


def test_other_services_keep_their_replicas():
    made, job = reconcile_agent(make_agent_job(LOOP), {"user": CALLS, "calc": CALLS, "fixed": CALLS})
    assert (replicas_of(made, "gsm8k-agent-fixed"), replicas_of(made)) == (2, 1)
    assert [record.name for record in job.status.scaling] == ["user", "calc"]


@pytest.mark.parametrize(("agent", "name"), [(LOOP, "user"), (LOOP, "calc"), (PROGRAM, "runner")])
def test_scale_up_of_a_service_changes_only_its_deployment_and_adds_its_budget(agent, name):
    before, job = reconcile_agent(make_agent_job(agent), {})
    made, _ = reconcile_agent(job, {name: CALLS})
    old, new = ({key_of(c): c for c in which.children} for which in (before, made))
    changed = [key for key in old if new[key] != old[key]]
    assert changed == [ChildKey("Deployment", f"gsm8k-agent-{name}")]
    assert new.keys() - old.keys() == {ChildKey("PodDisruptionBudget", f"gsm8k-agent-{name}")}
    assert new[changed[0]]["spec"]["template"] == old[changed[0]]["spec"]["template"]


def test_changed_autoscaling_of_a_runner_restarts_no_pod():
    other = PROGRAM | {"runner": PROGRAM["runner"] | {"autoscaling": {"maxReplicas": 3}}}
    plans = (reconcile_agent(make_agent_job(agent), {"runner": EPISODES})[0] for agent in (PROGRAM, other))
    old, new = ({key_of(c): c for c in made.children} for made in plans)
    for key, child in new.items():
        if key.kind in ("Deployment", "Job", "StatefulSet"):
            assert child["spec"]["template"] == old[key]["spec"]["template"], key


def test_job_runs_while_its_runner_has_no_pod():
    _, job = reconcile_agent(make_agent_job(PROGRAM), {})
    ready = {"conditions": [{"type": "Ready", "status": "True"}], "phase": "Running", "podIP": "10.0.0.1"}
    roles = ["head", "trainer", *(["rollout"] * job.spec.rollout.replicas), "reward"]
    pods = [make_pod(role, f"{role}-{i}") | {"status": ready} for i, role in enumerate(roles)]
    pods[-1]["metadata"]["labels"][LABEL_REWARD] = "correct"
    for demands in ({}, {"runner": EPISODES}):
        made, _ = reconcile_agent(job, demands, pods=tuple(pods))
        assert {each.type: each.status for each in made.status.conditions}["Running"] == "True"


def test_kueue_queues_each_pod_of_an_autoscaled_runner_alone():
    job = make_agent_job(PROGRAM, scheduling={"gang": "kueue", "queue": "team"})
    made, _ = reconcile_agent(job, {"runner": EPISODES})
    template = next(c for c in made.children if key_of(c) == ChildKey("Deployment", "gsm8k-agent-runner"))["spec"]
    labels = template["template"]["metadata"]["labels"]
    assert "kueue.x-k8s.io/queue-name" in labels
    assert "kueue.x-k8s.io/pod-group-name" not in labels


# ---- RewardModels ----


def make_model(**fields):
    metadata = {"name": "math", "namespace": "default", "uid": "m", "generation": 1}
    spec = {"autoscaling": {"minReplicas": 0, "maxReplicas": 50}, **SCORE, **fields}
    return RewardModel.model_validate({"metadata": metadata, "spec": spec})


def reconcile_model(model, demands, seconds=0.0, ready=0):
    observed = ObservedState(demands=tuple(demands))
    children = {key_of(c): c for c in plan_reward_model(model, observed, at(seconds), new_token=lambda: "t").children}
    children[ChildKey("Deployment", "math-rewardmodel")]["status"] = {"replicas": ready, "readyReplicas": ready}
    observed = ObservedState(children=children, demands=tuple(demands))
    made = plan_reward_model(model, observed, at(seconds), new_token=lambda: "t")
    return made, model.model_copy(update={"status": made.status})


def holds(status):
    return {condition.type: (condition.status, condition.reason) for condition in status.conditions}


def test_shared_model_adds_the_demands_of_its_jobs():
    made, model = reconcile_model(make_model(), [Demand("a/correct", BURST), Demand("b/correct", BURST)])
    assert replicas_of(made, "math-rewardmodel") == 10
    assert model.status.scaling.message == "wants 10: 2 jobs need 80 + 80 slots of 16"
    assert made.requeue_after_seconds == 2.0


def test_model_conditions_follow_scaling():
    _, model = reconcile_model(make_model(), [])
    assert holds(model.status) == {
        "Ready": ("True", "ScaledToZero"),
        "Degraded": ("False", "AllReady"),
        "Scaling": ("False", "Steady"),
        "Updating": ("False", "SingleVersion"),
    }
    made, model = reconcile_model(model, [Demand("a/correct", BURST)], 10)
    assert holds(model.status)["Scaling"] == ("True", "ScalingUp")
    assert holds(model.status)["Degraded"] == ("False", "Scaling"), "Pods may start"
    assert [event.message for event in made.events if event.reason == "ScaledUp"] == [
        "scaled from 0 to 5 Pods: wants 5: 640 samples x 4 s / 32 s = 80 slots of 16"
    ]
    made, model = reconcile_model(model, [Demand("a/correct", BURST)], 20, ready=5)
    assert (holds(model.status)["Scaling"], holds(model.status)["Ready"]) == (("False", "Steady"), ("True", "Serving"))
    made, model = reconcile_model(model, [Demand("a/correct", BURST)], 500, ready=3)
    assert holds(model.status)["Degraded"] == ("True", "TooFewReady"), "they should be there by now"


def test_model_reports_at_maximum():
    limited = make_model(autoscaling={"maxReplicas": 2})
    _, model = reconcile_model(limited, [Demand("a/correct", BURST)], ready=2)
    assert holds(model.status)["Scaling"] == ("False", "AtMaximum")


def test_idle_model_is_not_requeued():
    made, model = reconcile_model(make_model(), [])
    assert made.requeue_after_seconds is None
    again, _ = reconcile_model(model, [], 10)
    assert (again.status, again.events) == (model.status, ())


def test_job_demand_has_one_entry_per_reward_that_references_the_model():
    job = make_job(autoscaling=None)
    rewards = [{"name": n, "rewardModelRef": {"name": m}} for n, m in (("x", "math"), ("y", "other"), ("z", "math"))]
    job = RLJob.model_validate(job.to_manifest() | {"spec": job.spec.to_manifest() | {"rewards": rewards}})
    driver = DriverStatus(demand={"x": BURST, "y": BURST, "z": IDLE})
    seen = ObservedState(pods=(HEAD,), driver=driver)
    assert read_demands(job, seen, "math") == [Demand("gsm8k/x", BURST), Demand("gsm8k/z", IDLE)]
    assert read_demands(job, ObservedState(pods=(HEAD,)), "math")[0].reported is None, (
        "a running driver that does not answer"
    )
    assert read_demands(job, ObservedState(), "math") == []
