"""The limits of a namespace's policy: each is an error with path, limit and remedy, and stops nothing that runs."""

from datetime import UTC, datetime

import pytest

from rljob_api.manifest.policy import PolicyLimits, RLJobPolicy
from rljob_api.manifest.services.reward import RewardModel
from rljob_api.wire.contract import ANNOTATION_RESTART
from rljob_core.backend import ObservedState
from rljob_core.defaults import DEFAULTS
from rljob_core.plan import conditions
from rljob_core.plan.job import plan_job
from rljob_core.plan.policy_limits import _is_below
from rljob_core.plan.reward_model import plan_reward_model
from tests.support.job_simulation import FUNCTION, JobSimulation, make_agent_job, make_job

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SERVED = {"model": {"source": "/models/judge", "gpusPerReplica": 1}}


def make_policy(defaults=None, **limits):
    spec = {"limits": limits, "defaults": defaults or {}}
    return RLJobPolicy.model_validate({"metadata": {"name": "default", "namespace": "default"}, "spec": spec})


def make_reward(**fields):
    return {"rewards": [{"name": "correct", "function": FUNCTION} | fields]}


def find_problems(policy, job):
    plan = plan_job(job, ObservedState(policy=policy), NOW)
    failed = conditions.find(plan.status, conditions.FAILED)
    if failed.status == "True":
        assert (failed.reason, plan.children) == (conditions.REASON_INVALID_SPEC, ()), "no child is created"
    return failed.message if failed.status == "True" else ""


POOL = {"nodePool": {"nodeSelector": {"pool": "a100"}}}
ON_POOLS = {"head": POOL, "trainer": POOL, "rollout": POOL} | make_reward(**POOL)
VIOLATIONS = {
    "gpus": (
        {"gpus": 3},
        {"trainer": {"replicas": 2, "gpusPerReplica": 1}, "rollout": {"replicas": 1, "gpusPerReplica": 2}},
        "spec must ask for at most 3 GPUs, got 4 (spec.trainer 2, spec.rollout 2)",
    ),
    "gpus of a template": (
        {"gpus": 0},
        {
            "head": {
                "template": {"spec": {"containers": [{"name": "head", "resources": {"limits": {"amd.com/gpu": 2}}}]}}
            }
        },
        "got 2 (spec.head 2)",
    ),
    "gpus beside resources of the Pod, which has none": (
        {"gpus": 0},
        {
            "head": {
                "template": {
                    "spec": {
                        "resources": {"limits": {"cpu": 1, "nvidia.com/gpu": 0}},
                        "containers": [{"name": "head", "resources": {"limits": {"nvidia.com/gpu": "1k"}}}],
                    }
                }
            }
        },
        "got 1000 (spec.head 1000)",
    ),
    "gpus by another name": (
        {"gpus": 0},
        {"trainer": {"gpusPerReplica": 1, "nodePool": {"gpuResource": "acme.io/chip"}}},
        "got 1 (spec.trainer 1)",
    ),
    "a part of a GPU by the name of another plugin": (
        {"gpus": 8, "devices": ["rdma/hca"]},
        {"trainer": {"resources": {"limits": {"aliyun.com/gpu-mem": 80, "rdma/hca": 4}}}},
        "spec must ask for at most 8 GPUs, got 80 (spec.trainer 80)",
    ),
    "rollouts": (
        {"rolloutReplicas": 2},
        {"rollout": {"replicas": 3}},
        "spec.rollout.replicas must be at most 2, got 3",
    ),
    "rewards": ({"rewardReplicas": 2}, make_reward(replicas=3), "spec.rewards[0].replicas must be at most 2, got 3"),
    "autoscaled rewards": (
        {"rewardReplicas": 2},
        make_reward(autoscaling={"maxReplicas": 3}),
        "spec.rewards[0].autoscaling.maxReplicas must be at most 2, got 3",
    ),
    "image": (
        {"images": ["registry.io/team"]},
        {"trainer": {"image": "docker.io/evil:1"}},
        "spec.trainer.image must begin with registry.io/team, got docker.io/evil:1",
    ),
    "image of a template": (
        {"images": ["registry.io/team"]},
        {"head": {"template": {"spec": {"initContainers": [{"name": "x", "image": "evil"}]}}}},
        "spec.head.template.spec.initContainers[0].image must begin with registry.io/team, got evil",
    ),
    "image volume": (
        {"images": ["registry.io/team"]},
        {"head": {"template": {"spec": {"volumes": [{"name": "x", "image": {"reference": "evil"}}]}}}},
        "must begin with registry.io/team, got evil",
    ),
    "another pool": (
        {"nodeLabels": {"pool": ["a100", "l4"]}},
        ON_POOLS | {"trainer": {"nodePool": {"nodeSelector": {"pool": "h100"}}}},
        "spec.trainer.nodePool.nodeSelector.pool must be one of a100, l4, got h100",
    ),
    "no pool": (
        {"nodeLabels": {"pool": ["a100"]}},
        ON_POOLS | {"head": {}},
        "spec.head.nodePool.nodeSelector.pool must be one of a100, got none",
    ),
    "pool of a template": (
        {"nodeLabels": {"pool": ["a100"]}},
        ON_POOLS | {"head": POOL | {"template": {"spec": {"nodeSelector": {"pool": "h100"}}}}},
        "spec.head.template.spec.nodeSelector.pool must be one of a100, got h100",
    ),
    "no queue": ({"queues": ["a"]}, {}, "spec.scheduling.queue must be one of a, got none"),
    "another queue": (
        {"queues": ["a"]},
        {"scheduling": {"gang": "kueue", "queue": "b"}},
        "spec.scheduling.queue must be one of a, got b",
    ),
    "queue of a template": (
        {"queues": ["a"]},
        {
            "head": {"template": {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "b"}}}},
        },
        "spec.head.template.metadata.labels.kueue.x-k8s.io/queue-name must be one of a, got b",
    ),
    "Volcano's queue of a template": (
        {"queues": ["a"]},
        {
            "scheduling": {"gang": "kueue", "queue": "a"},
            "head": {"template": {"metadata": {"annotations": {"scheduling.volcano.sh/queue-name": "b"}}}},
        },
        "spec.head.template.metadata.annotations.scheduling.volcano.sh/queue-name must be one of a, got b",
    ),
    "KAI's queue of a template": (
        {"queues": ["a"]},
        {
            "scheduling": {"gang": "kueue", "queue": "a"},
            "head": {"template": {"metadata": {"labels": {"kai.scheduler/queue": "b", "queue": "c"}}}},
        },
        "spec.head.template.metadata.labels.kai.scheduler/queue must be one of a, got b",
    ),
    "Kueue's priority of a template": (
        {"priorityClasses": ["low"]},
        {"head": {"template": {"metadata": {"labels": {"kueue.x-k8s.io/priority-class": "high"}}}}},
        "spec.head.template.metadata.labels.kueue.x-k8s.io/priority-class must be one of low, got high",
    ),
    "priority": (
        {"priorityClasses": ["low"]},
        {"priorityClassName": "high"},
        "spec.priorityClassName must be one of low, got high",
    ),
    "priority of a template": (
        {"priorityClasses": ["low"]},
        {"head": {"template": {"spec": {"priorityClassName": "high"}}}},
        "spec.head.template.spec.priorityClassName must be one of low, got high",
    ),
    "template": (
        {"templateFields": []},
        {"head": {"template": {"spec": {"hostname": "x"}}}},
        "spec.head.template.spec.hostname is not allowed: templates may set no field",
    ),
    "field of a template": (
        {"templateFields": ["metadata.annotations"]},
        {"head": {"template": {"metadata": {"annotations": {"a": "b"}, "labels": {"a": "b"}}}}},
        "spec.head.template.metadata.labels is not allowed: templates may set metadata.annotations",
    ),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_violation_is_an_invalid_spec_with_path_limit_and_remedy(name):
    limits, spec, expected = VIOLATIONS[name]
    message = find_problems(make_policy(**limits), make_job(**spec))
    assert expected in message
    assert f"(spec.limits.{next(iter(limits))} of RLJobPolicy default/default); " in message


def test_every_limit_has_a_case():
    names = {name for limits, _, _ in VIOLATIONS.values() for name in limits}
    assert names == {field.alias for field in PolicyLimits.model_fields.values()}


@pytest.mark.parametrize(
    ("limits", "spec"),
    [
        ({"gpus": 4}, {"trainer": {"replicas": 2, "gpusPerReplica": 1}, "rollout": {"gpusPerReplica": 2}}),
        ({"gpus": 1}, {"trainer": {"gpusPerReplica": 1}, "rollout": {"placement": "trainer", "gpusPerReplica": 1},
                       "schedule": {"type": "onPolicy"}}),
        ({"gpus": 0, "devices": ["rdma/hca"]}, {"trainer": {"resources": {"limits": {
            "rdma/hca": 4, "example.kubernetes.io/x": 1}}}}),
        ({"images": ["registry.io"]}, {"trainer": {"image": "registry.io/x/y:1"}}),
        ({"nodeLabels": {"pool": ["a100"]}}, ON_POOLS),
        ({"queues": ["a"]}, {"scheduling": {"gang": "kueue", "queue": "a"}}),
        ({"priorityClasses": ["low"]}, {"priorityClassName": "low"}),
        ({"priorityClasses": ["low"]}, {}),
        ({"templateFields": ["spec.hostname"]}, {"head": {"template": {"spec": {"hostname": "x"}}}}),
        ({"rolloutReplicas": 1, "rewardReplicas": 1}, {}),
    ],
)  # fmt: skip
def test_job_within_the_limits_starts(limits, spec):
    assert find_problems(make_policy(**limits), make_job(**spec)) == ""


def test_own_defaults_of_the_platform_are_within_its_limits():
    defaults = {"trainerImage": "other.io/t", "priorityClassName": "team", "queue": "a"}
    defaults |= {"nodeSelector": {"pool": "a100"}}
    limits = {"images": ["registry.io"], "priorityClasses": ["low"], "queues": ["a"], "nodeLabels": {"pool": ["a100"]}}
    assert find_problems(make_policy(defaults, **limits), make_job()) == ""


def test_most_replicas_of_autoscaling_count():
    policy = make_policy(gpus=2)
    scaled = make_job(**make_reward(autoscaling={"maxReplicas": 3}) | {"rewards": [
        {"name": "judge", "autoscaling": {"maxReplicas": 3}} | SERVED]})  # fmt: skip
    assert "got 3 (spec.rewards[0] 3)" in find_problems(policy, scaled)


def test_replicas_of_an_agents_services_are_limited():
    job = make_agent_job(tool={"replicas": 3})
    expected = "spec.agent.tools[0].replicas must be at most 2, got 3"
    assert expected in find_problems(make_policy(rewardReplicas=2), job)


def test_gpus_of_sandboxes_count():
    sandbox = {"provider": "agentSandbox", "warmReplicas": 2, "resources": {"limits": {"nvidia.com/gpu": 1}}}
    job = make_agent_job(
        tool={"function": None, "sandbox": sandbox},
        schedule={"promptsPerStep": 3},
        algorithm={"groupSize": 4},
    )
    assert "got 14 (spec.agent.tools[0] 14)" in find_problems(make_policy(gpus=13), job)
    assert find_problems(make_policy(gpus=14), job) == ""


def test_all_violations_are_reported_at_once():
    policy = make_policy(rolloutReplicas=1, queues=["a"])
    message = find_problems(policy, make_job(rollout={"replicas": 2}))
    assert "spec.rollout.replicas" in message
    assert "spec.scheduling.queue" in message


@pytest.mark.parametrize(
    ("image", "name", "expected"),
    [
        ("registry.io/a", "registry.io/a", True),
        ("registry.io/a:1", "registry.io/a", True),
        ("registry.io/a@sha256:1", "registry.io/a/", True),
        ("registry.io/a/b:1", "registry.io/a", True),
        ("registry.io/a/../evil/x", "registry.io/a", False),
        ("registry.io/a/..b:1", "registry.io/a", True),
        ("registry.io/ab:1", "registry.io/a", False),
        ("registry.io.evil.com/a", "registry.io", False),
        ("registry.io:5000/a", "registry.io", False),
        ("registry.io:5000/a", "registry.io:5000", True),
        ("x/registry.io/a", "registry.io", False),
    ],
)
def test_image_is_below_a_name_at_the_boundary_of_a_part(image, name, expected):
    assert _is_below(image, name) is expected


def make_model(**spec):
    metadata = {"name": "m", "generation": 1, "uid": "u"}
    return RewardModel.model_validate({"metadata": metadata, "spec": spec})


def test_reward_model_is_limited():
    plan = plan_reward_model(make_model(**SERVED, replicas=3), ObservedState(policy=make_policy(gpus=2)), NOW)
    ready = conditions.find(plan.status, "Ready")
    assert (ready.reason, plan.children) == (conditions.REASON_INVALID_SPEC, ())
    assert "spec must ask for at most 2 GPUs, got 3 (spec 3)" in ready.message


def test_reward_model_that_is_served_elsewhere_has_no_replicas():
    model = make_model(http={"url": "http://rewards/score"})
    plan = plan_reward_model(model, ObservedState(policy=make_policy(rewardReplicas=0)), NOW)
    assert conditions.find(plan.status, "Ready").reason != conditions.REASON_INVALID_SPEC


def test_label_of_a_reward_models_template_names_no_other_queue():
    policy, template = make_policy(queues=["a"]), {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "b"}}}
    plan = plan_reward_model(make_model(**SERVED, template=template), ObservedState(policy=policy), NOW)
    ready = conditions.find(plan.status, "Ready")
    assert "queue-name must be one of a, got b" in ready.message.replace('"', "")
    assert plan_reward_model(make_model(**SERVED), ObservedState(policy=policy), NOW).children != ()


def test_lower_limit_stops_nothing_that_exists_and_holds_for_the_next_change():
    simulation = JobSimulation(make_job(rollout={"replicas": 2}))
    simulation.policy = make_policy(rolloutReplicas=2)
    simulation.reconcile()
    simulation.reconcile()
    simulation.policy = make_policy(rolloutReplicas=1)
    simulation.reconcile()
    assert simulation.writes == 0
    assert not conditions.is_true(simulation.job.status, conditions.FAILED)
    change(simulation, 3)
    simulation.reconcile()
    assert conditions.is_true(simulation.job.status, conditions.FAILED)
    assert simulation.has_workloads(), "those of the earlier spec stay"
    simulation.reconcile()
    assert simulation.writes == 0, "it stays refused, and no reconcile writes"
    assert conditions.is_true(simulation.job.status, conditions.FAILED)
    change(simulation, 1)
    simulation.reconcile()
    assert not conditions.is_true(simulation.job.status, conditions.FAILED)


def set_conditions(simulation, **fields):
    """Make the job Running. `fields`: of its status."""
    status = simulation.job.status
    made = [c.model_copy(update={"status": "True"}) if c.type == "Running" else c for c in status.conditions]
    status = status.model_copy(update={"conditions": made} | fields)
    simulation.job = simulation.job.model_copy(update={"status": status})


def test_lower_limit_stops_no_running_job_whose_workloads_are_all_replaced():
    on_trainer = {"rollout": {"placement": "trainer", "gpusPerReplica": 1}, "schedule": {"type": "onPolicy"}}
    rewards = [{"name": "correct", "http": {"url": "http://rewards/score"}}]
    simulation = JobSimulation(make_job(trainer={"gpusPerReplica": 1}, rewards=rewards, **on_trainer))
    simulation.reconcile()
    set_conditions(simulation)
    simulation.policy = make_policy(gpus=0)
    metadata = simulation.job.metadata.model_copy(update={"annotations": {ANNOTATION_RESTART: "now"}})
    simulation.job = simulation.job.model_copy(update={"metadata": metadata})
    simulation.reconcile()
    assert not simulation.has_workloads(), "head and trainer are replaced together"
    simulation.reconcile()
    assert simulation.has_workloads()
    assert not conditions.is_true(simulation.job.status, conditions.FAILED)


def test_change_that_was_not_applied_for_another_reason_is_checked():
    simulation = JobSimulation(make_job())
    simulation.reconcile()
    simulation.policy = make_policy(rolloutReplicas=1)
    change(simulation, 2)
    set_conditions(simulation, observed_generation=2)  # as a failed reconcile of generation 2
    simulation.reconcile()
    assert conditions.is_true(simulation.job.status, conditions.FAILED)


def change(simulation, replicas):
    job = simulation.job
    rollout = job.spec.rollout.model_copy(update={"replicas": replicas})
    metadata = job.metadata.model_copy(update={"generation": job.metadata.generation + 1})
    spec = job.spec.model_copy(update={"rollout": rollout})
    simulation.job = job.model_copy(update={"metadata": metadata, "spec": spec})


def test_refused_job_starts_when_the_limit_is_raised():
    simulation = JobSimulation(make_job(rollout={"replicas": 2}))
    simulation.policy = make_policy(rolloutReplicas=1)
    simulation.reconcile()
    assert not simulation.children
    simulation.policy = make_policy(rolloutReplicas=2)
    simulation.reconcile()
    assert simulation.has_workloads()


def test_suspended_job_is_checked_when_it_resumes():
    simulation = JobSimulation(make_job(rollout={"replicas": 2}, suspend=True))
    simulation.policy = make_policy(rolloutReplicas=1)
    simulation.reconcile()
    assert conditions.is_true(simulation.job.status, conditions.SUSPENDED)
    job = simulation.job
    resumed = job.metadata.model_copy(update={"generation": 2})
    simulation.job = job.model_copy(
        update={"metadata": resumed, "spec": job.spec.model_copy(update={"suspend": False})}
    )
    simulation.reconcile()
    assert conditions.is_true(simulation.job.status, conditions.FAILED)
    assert not simulation.has_workloads()


def test_unreadable_policy_lets_nothing_new_start():
    plan = plan_job(make_job(), ObservedState(policy_problem="RLJobPolicy x cannot be read"), NOW, defaults=DEFAULTS)
    assert not plan.children
    assert conditions.find(plan.status, conditions.FAILED).message == "RLJobPolicy x cannot be read"
