"""The defaults of a namespace's policy: what they replace, and that they change nothing that exists."""

from datetime import UTC, datetime

import pytest

from rljob_api.manifest.policy import PolicyDefaults, RLJobPolicy
from rljob_api.manifest.services.reward import RewardModel
from rljob_core.backend import ChildKey, ObservedState
from rljob_core.children.gang import LABEL_KUEUE_QUEUE
from rljob_core.defaults import DEFAULTS, Defaults
from rljob_core.plan.job import plan_job
from rljob_core.plan.policy_defaults import apply_policy
from rljob_core.plan.reward_model import plan_reward_model
from tests.support.job_simulation import FUNCTION, JobSimulation, make_agent_job, make_job

NOW = datetime(2026, 1, 1, tzinfo=UTC)
HEAD, TRAINER = ChildKey("Job", "gsm8k-head"), ChildKey("StatefulSet", "gsm8k-trainer")
REWARD = ChildKey("Deployment", "gsm8k-reward-correct")


def make_policy(**defaults):
    return RLJobPolicy.model_validate({"metadata": {"name": "default"}, "spec": {"defaults": defaults}})


def simulate(policy, **spec):
    simulation = JobSimulation(make_job(**spec))
    simulation.policy = policy
    simulation.reconcile()
    return simulation


def pod_of(simulation, key):
    return simulation.children[key]["spec"]["template"]["spec"]


def test_no_policy_is_the_same_object():
    assert apply_policy(DEFAULTS, None) is DEFAULTS
    assert apply_policy(DEFAULTS, make_policy()) is DEFAULTS


def test_every_default_of_a_policy_reaches_the_defaults():
    values = {
        "trainer_image": "r/t:1",
        "reward_image": "r/r:1",
        "python_images": {"3.12": "r/r312:1"},
        "image_pull_policy": "Always",
        "image_pull_secrets": [{"name": "pull"}],
        "resources": {"trainer": {"requests": {"memory": "4Gi"}}},
        "reward_scratch_size": "1Gi",
        "node_selector": {"team": "a"},
        "tolerations": [{"key": "team", "value": "a"}],
        "node_pools": {"trainer": {"nodeSelector": {"pool": "h100"}}},
        "queue": "team-a",
        "priority_class_name": "low",
        "runtime_class_name": "gvisor",
        "labels": {"cost": "a"},
        "annotations": {"cost": "a"},
        "log_format": "json",
    }
    assert values.keys() == PolicyDefaults.model_fields.keys(), "a case for each field"
    applied = apply_policy(DEFAULTS, make_policy(**values))
    for name in values.keys() - {"queue"}:  # the queue is one of the job's own fields
        assert getattr(applied, name) != getattr(DEFAULTS, name), name


def test_policy_is_merged_over_the_installation():
    installed = Defaults(
        node_selector={"zone": "1", "team": "none"},
        tolerations=[{"key": "all", "operator": "Exists"}],
        resources={"trainer": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "2Gi"}}},
        node_pools={"trainer": {"node_selector": {"disk": "ssd", "pool": "a100"}}},
    )
    policy = make_policy(
        nodeSelector={"team": "a"},
        tolerations=[{"key": "team", "operator": "Exists"}],
        resources={"trainer": {"requests": {"memory": "4Gi"}}},
        nodePools={"trainer": {"nodeSelector": {"pool": "h100"}}},
    )
    applied = apply_policy(installed, policy)
    assert applied.node_selector == {"zone": "1", "team": "a"}
    assert [toleration.key for toleration in applied.tolerations] == ["team", "all"]
    trainer = applied.resources.trainer
    assert trainer.requests == {"cpu": "1", "memory": "4Gi"}
    assert trainer.limits == {}, "the installation's limit of 2Gi is below the policy's request"
    assert applied.node_pools.trainer.node_selector == {"disk": "ssd", "pool": "h100"}


def test_nodes_of_a_policy_replace_those_of_the_installation_by_role():
    installed = Defaults(node_pools={"trainer": {"node_selector": {"pool": "all", "disk": "ssd"}}})
    policy = make_policy(nodeSelector={"pool": "team"})
    plan = plan_job(make_job(), ObservedState(policy=policy), NOW, defaults=installed)
    trainer = next(child for child in plan.children if child["kind"] == "StatefulSet")
    assert trainer["spec"]["template"]["spec"]["nodeSelector"] == {"pool": "team", "disk": "ssd"}


def test_job_gets_the_policy_and_its_own_fields_take_precedence():
    pools = {"trainer": {"nodeSelector": {"pool": "h100", "zone": "1"}}, "reward": {"nodeSelector": {"pool": "cpu"}}}
    policy = make_policy(trainerImage="r/t:1", nodePools=pools, nodeSelector={"team": "a"})
    own = {"nodePool": {"nodeSelector": {"zone": "2"}}}
    simulation = simulate(policy, trainer=own, rollout={"image": "mine:1"})
    trainer, rollout = pod_of(simulation, TRAINER), pod_of(simulation, ChildKey("Deployment", "gsm8k-rollout"))
    assert trainer["nodeSelector"] == {"team": "a", "pool": "h100", "zone": "2"}
    assert trainer["containers"][0]["image"] == "r/t:1"
    assert rollout["containers"][0]["image"] == "mine:1"
    assert pod_of(simulation, REWARD)["nodeSelector"] == {"team": "a", "pool": "cpu"}
    assert pod_of(simulation, HEAD)["nodeSelector"] == {"team": "a"}


def test_pods_of_an_agent_are_on_the_nodes_of_rewards():
    policy = make_policy(nodePools={"reward": {"nodeSelector": {"pool": "cpu"}}})
    plan = plan_job(make_agent_job(), ObservedState(policy=policy), NOW)
    user = next(c for c in plan.children if c["kind"] == "Deployment" and c["metadata"]["name"].endswith("-user"))
    assert user["spec"]["template"]["spec"]["nodeSelector"] == {"pool": "cpu"}


def test_reward_model_gets_the_policy():
    model = RewardModel.model_validate({"metadata": {"name": "m"}, "spec": {"function": {"inline": "def f(): ..."}}})
    policy = make_policy(rewardImage="r/r:1", nodePools={"reward": {"nodeSelector": {"pool": "cpu"}}})
    plan = plan_reward_model(model, ObservedState(policy=policy), NOW)
    pod = next(c for c in plan.children if c["kind"] == "Deployment")["spec"]["template"]["spec"]
    assert (pod["containers"][0]["image"], pod["nodeSelector"]) == ("r/r:1", {"pool": "cpu"})


@pytest.mark.parametrize("later", [None, make_policy(trainerImage="r/t:2", nodeSelector={"team": "b"}, queue="b")])
def test_changed_or_deleted_policy_writes_nothing_of_an_existing_job(later):
    simulation = simulate(make_policy(trainerImage="r/t:1", nodeSelector={"team": "a"}, queue="a"))
    simulation.reconcile()
    simulation.policy = later
    before = simulation.children
    simulation.reconcile()
    assert simulation.writes == 0, "its Pods keep image, nodes and queue"
    assert simulation.children == before


def test_policy_that_comes_later_puts_no_existing_job_in_a_queue():
    simulation = simulate(None)
    simulation.reconcile()
    simulation.policy = make_policy(queue="a")
    simulation.reconcile()
    assert simulation.writes == 0


@pytest.mark.parametrize(
    ("scheduling", "queue"),
    [({}, "a"), ({"gang": "kueue", "queue": "b"}, "b"), ({"gang": "gates"}, None), ({"timeoutSeconds": 60}, "a")],
)
def test_job_without_gang_and_queue_is_in_the_queue_of_the_policy(scheduling, queue):
    simulation = simulate(make_policy(queue="a"), scheduling=scheduling)
    template = simulation.children[TRAINER]["spec"]["template"]["metadata"]
    assert template["labels"].get(LABEL_KUEUE_QUEUE) == queue


def test_label_of_a_users_template_is_no_queue_of_rljob():
    template = {"metadata": {"labels": {LABEL_KUEUE_QUEUE: "mine"}}}
    simulation = simulate(None, trainer={"template": template}, head={"template": template})
    simulation.reconcile()
    assert simulation.writes == 0, "without the annotation of RLJob, the job is in no gang of Kueue"


def test_waiting_job_that_gives_up_its_own_queue_leaves_it():
    simulation = simulate(None, scheduling={"gang": "kueue", "queue": "typo"})
    simulation.reconcile()
    metadata = simulation.job.metadata.model_copy(update={"generation": 2})
    simulation.job = simulation.job.model_copy(update={"metadata": metadata, "spec": make_job().spec})
    for _ in range(3):
        simulation.reconcile()
    template = simulation.children[TRAINER]["spec"]["template"]["metadata"]
    assert LABEL_KUEUE_QUEUE not in template["labels"]


def test_workloads_of_an_earlier_job_decide_no_queue():
    simulation = simulate(None)
    earlier = {REWARD: simulation.children[REWARD]}
    new = make_job(rewards=[{"name": "other", "function": FUNCTION}])
    job = new.model_copy(update={"metadata": new.metadata.model_copy(update={"uid": "u2"})})
    policy = RLJobPolicy.model_validate(
        {"metadata": {"name": "default"}, "spec": {"defaults": {"queue": "a"}, "limits": {"queues": ["a"]}}}
    )
    plan = plan_job(job, ObservedState(earlier, policy=policy), NOW)
    trainer = next(child for child in plan.children if child["kind"] == "StatefulSet")
    assert trainer["spec"]["template"]["metadata"]["labels"][LABEL_KUEUE_QUEUE] == "a"
