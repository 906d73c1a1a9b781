"""Autoscaled rewards in the plan: replicas, status, events and when to look again."""

from datetime import UTC, datetime, timedelta

import pytest
import yaml

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.reward import RewardModel
from rljob_api.wire.contract import LABEL_REWARD, LABEL_ROLE
from rljob_api.wire.protocol import DriverStatus, RewardDemand
from rljob_operator.backend import PROGRESS_POLL_SECONDS, ChildKey, Demand, ObservedState, key_of
from rljob_operator.children.gang import count_desired_pods
from rljob_operator.plan.apply_scaling import measure_startup_seconds, read_demands, scale_job
from rljob_operator.plan.job import plan_job
from rljob_operator.plan.reward_model import plan_reward_model
from tests.paths import ROOT

DATA = ROOT / "tests" / "data" / "plan"
NOW = datetime(2026, 1, 2, tzinfo=UTC)
BURST = RewardDemand(
    samples=640, expected=640, is_open=True, due_seconds=40.0, window_seconds=40.0, latency_seconds=4.0
)
REST = RewardDemand()
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


def look(job, demand=None, seconds=0.0, pods=(HEAD,)):
    """One look at the job. Returns the plan and the job as stored after it."""
    driver = None if demand is None else DriverStatus(phase="generate", demand={"correct": demand})
    made = plan_job(job, ObservedState(pods=pods, driver=driver), at(seconds), new_token=lambda: "t")
    return made, job.model_copy(update={"status": made.status})


def replicas_of(made, name="gsm8k-reward-correct"):
    return next(c for c in made.children if key_of(c) == ChildKey("Deployment", name))["spec"]["replicas"]


def reasons(made):
    return [event.reason for event in made.events if event.reason.startswith("Scaled")]


def test_before_there_is_a_driver_it_has_the_fewest():
    made, job = look(make_job(), pods=())
    assert (replicas_of(made), job.status.scaling[0].replicas, reasons(made)) == (0, 0, [])


def test_before_the_burst_its_pods_are_asked_for_and_the_status_says_why():
    _, job = look(make_job(), pods=())
    made, job = look(job, BURST)
    assert replicas_of(made) == 5
    [record] = job.status.scaling
    assert (record.name, record.replicas, record.slots, record.samples) == ("correct", 5, 80, 640)
    assert record.message == "wants 5: 640 samples x 4 s / 32 s = 80 slots of 16"
    assert [event.message for event in made.events if event.reason == "ScaledUp"] == [
        "reward correct from 0 to 5 Pods: wants 5: 640 samples x 4 s / 32 s = 80 slots of 16"
    ]
    assert next(role for role in job.status.roles if role.name == "reward-correct").desired == 5
    assert job.status.rewards == "0/5"


def test_nothing_is_written_while_the_step_goes_on():
    _, job = look(make_job(), BURST)
    for seconds in range(2, 200, 2):
        going = BURST.model_copy(update={"expected": max(1, 640 - 4 * seconds), "elapsed_seconds": seconds / 10})
        made, after = look(job, going, seconds)
        assert (after.status, reasons(made)) == (job.status, [])


def test_a_scale_up_changes_no_file_and_rolls_no_pod():
    before, job = look(make_job(), REST)
    made, _ = look(job, BURST)
    old, new = ({key_of(c): c for c in which.children} for which in (before, made))
    changed = [key for key in new if new[key] != old[key]]
    assert changed == [ChildKey("Deployment", "gsm8k-reward-correct")]
    assert new[changed[0]]["spec"]["template"] == old[changed[0]]["spec"]["template"]


def test_a_change_of_its_autoscaling_restarts_nobody():
    made, other = look(make_job(), BURST)[0], look(make_job(autoscaling={"maxReplicas": 3}), BURST)[0]
    old, new = ({key_of(c): c for c in which.children} for which in (made, other))
    for key, child in new.items():
        if key.kind in ("Deployment", "Job", "StatefulSet"):
            assert child["spec"]["template"] == old[key]["spec"]["template"], key


def test_pods_that_are_still_to_come_are_no_restart():
    job = make_job()
    _, job = look(job, REST)
    running = [c.model_copy(update={"status": "True"}) if c.type == "Running" else c for c in job.status.conditions]
    job = job.model_copy(update={"status": job.status.model_copy(update={"conditions": running})})
    ready = {"conditions": [{"type": "Ready", "status": "True"}], "phase": "Running", "podIP": "10.0.0.1"}
    pods = tuple(make_pod(role, role) | {"status": ready} for role in ("head", "trainer"))
    pods += tuple(make_pod("rollout", f"rollout-{i}") | {"status": ready} for i in range(job.spec.rollout.replicas))
    made, _ = look(job, BURST, pods=pods)
    states = {condition.type: condition.status for condition in made.status.conditions}
    assert (states["Running"], states["Restarting"]) == ("True", "False")


def test_the_driver_is_asked_often_while_a_burst_is_near():
    assert look(make_job(), BURST)[0].requeue_after_seconds == 2.0
    far = BURST.model_copy(update={"is_open": False, "starts_in_seconds": 90.0})
    assert look(make_job(), far)[0].requeue_after_seconds == PROGRESS_POLL_SECONDS
    fixed = make_job(autoscaling=None)
    assert look(fixed, BURST)[0].requeue_after_seconds == PROGRESS_POLL_SECONDS


def test_a_silent_driver_takes_nothing_away_and_a_head_that_is_gone_does():
    _, job = look(make_job(), BURST)
    assert replicas_of(look(job, None, 10_000)[0]) == 5
    _, job = look(job, None, 0, pods=())
    assert replicas_of(look(job, None, 301, pods=())[0]) == 0


def test_a_suspended_job_forgets_and_one_that_has_ended_remembers():
    _, job = look(make_job(), BURST)
    suspended = job.model_copy(update={"spec": job.spec.model_copy(update={"suspend": True})})
    assert look(suspended, None)[1].status.scaling == []
    ended = [c.model_copy(update={"status": "True"}) if c.type == "Succeeded" else c for c in job.status.conditions]
    job = job.model_copy(update={"status": job.status.model_copy(update={"conditions": ended})})
    assert scale_job(job, ObservedState(), at(10_000)).job == job


def test_a_fixed_number_is_left_alone_and_forgets_what_was_decided():
    fixed = make_job(autoscaling=None, replicas=3)
    assert scale_job(fixed, ObservedState(driver=DriverStatus(demand={"correct": BURST})), NOW).job == fixed
    _, job = look(make_job(), BURST)
    spec = job.spec.model_copy(update={"rewards": fixed.spec.rewards})
    assert look(job.model_copy(update={"spec": spec}), BURST)[1].status.scaling == []


def test_a_gang_counts_the_fewest():
    job = scale_job(make_job(), ObservedState(pods=(HEAD,), driver=DriverStatus(demand={"correct": BURST})), NOW).job
    assert job.spec.rewards[0].replicas == 5
    assert count_desired_pods(job) == count_desired_pods(make_job())


@pytest.mark.parametrize(("seconds", "lead"), [([], 60), ([30, 40, 50], 40), ([1], 10), ([5000], 900)])
def test_the_lead_is_what_its_own_pods_took(seconds, lead):
    pods = []
    for number in seconds:
        pod = make_pod("reward", f"r{number}", **{LABEL_REWARD: "correct"})
        pod["metadata"]["creationTimestamp"] = "2026-01-02T00:00:00Z"
        ready = f"{at(number):%Y-%m-%dT%H:%M:%SZ}"
        pod["status"]["conditions"] = [{"type": "Ready", "status": "True", "lastTransitionTime": ready}]
        pods.append(pod)
    assert measure_startup_seconds([*pods, make_pod("reward", "unready")]) == lead


# ---- RewardModels ----


def make_model(**fields):
    metadata = {"name": "math", "namespace": "default", "uid": "m", "generation": 1}
    spec = {"autoscaling": {"minReplicas": 0, "maxReplicas": 50}, **SCORE, **fields}
    return RewardModel.model_validate({"metadata": metadata, "spec": spec})


def look_at_model(model, demands, seconds=0.0, ready=0):
    observed = ObservedState(demands=tuple(demands))
    children = {key_of(c): c for c in plan_reward_model(model, observed, at(seconds), new_token=lambda: "t").children}
    children[ChildKey("Deployment", "math-rewardmodel")]["status"] = {"replicas": ready, "readyReplicas": ready}
    observed = ObservedState(children=children, demands=tuple(demands))
    made = plan_reward_model(model, observed, at(seconds), new_token=lambda: "t")
    return made, model.model_copy(update={"status": made.status})


def holds(status):
    return {condition.type: (condition.status, condition.reason) for condition in status.conditions}


def test_a_shared_model_adds_up_what_its_jobs_ask_for():
    made, model = look_at_model(make_model(), [Demand("a/correct", BURST), Demand("b/correct", BURST)])
    assert replicas_of(made, "math-rewardmodel") == 10
    assert model.status.scaling.message == "wants 10: 2 jobs need 80 + 80 slots of 16"
    assert made.requeue_after_seconds == 2.0


def test_a_model_says_what_it_does_and_why():
    _, model = look_at_model(make_model(), [])
    assert holds(model.status) == {
        "Ready": ("True", "ScaledToZero"),
        "Degraded": ("False", "AllReady"),
        "Scaling": ("False", "Steady"),
        "Updating": ("False", "SingleVersion"),
    }
    made, model = look_at_model(model, [Demand("a/correct", BURST)], 10)
    assert holds(model.status)["Scaling"] == ("True", "ScalingUp")
    assert holds(model.status)["Degraded"] == ("False", "Scaling"), "Pods that start are no trouble"
    assert [event.message for event in made.events if event.reason == "ScaledUp"] == [
        "scaled from 0 to 5 Pods: wants 5: 640 samples x 4 s / 32 s = 80 slots of 16"
    ]
    made, model = look_at_model(model, [Demand("a/correct", BURST)], 20, ready=5)
    assert (holds(model.status)["Scaling"], holds(model.status)["Ready"]) == (("False", "Steady"), ("True", "Serving"))
    made, model = look_at_model(model, [Demand("a/correct", BURST)], 500, ready=3)
    assert holds(model.status)["Degraded"] == ("True", "TooFewReady"), "they should be there by now"


def test_a_model_at_its_maximum_says_so():
    limited = make_model(autoscaling={"maxReplicas": 2})
    _, model = look_at_model(limited, [Demand("a/correct", BURST)], ready=2)
    assert holds(model.status)["Scaling"] == ("False", "AtMaximum")


def test_a_model_at_rest_is_not_looked_at_again():
    made, model = look_at_model(make_model(), [])
    assert made.requeue_after_seconds is None
    again, _ = look_at_model(model, [], 10)
    assert (again.status, again.events) == (model.status, ())


def test_a_jobs_demand_of_a_model_is_that_of_each_reward_that_names_it():
    job = make_job(autoscaling=None)
    rewards = [{"name": n, "rewardModelRef": {"name": m}} for n, m in (("x", "math"), ("y", "other"), ("z", "math"))]
    job = RLJob.model_validate(job.to_manifest() | {"spec": job.spec.to_manifest() | {"rewards": rewards}})
    driver = DriverStatus(demand={"x": BURST, "y": BURST, "z": REST})
    seen = ObservedState(pods=(HEAD,), driver=driver)
    assert read_demands(job, seen, "math") == [Demand("gsm8k/x", BURST), Demand("gsm8k/z", REST)]
    assert read_demands(job, ObservedState(pods=(HEAD,)), "math")[0].reported is None, "it runs and does not answer"
    assert read_demands(job, ObservedState(), "math") == []
