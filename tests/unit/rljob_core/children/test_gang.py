"""The fields that Kueue reads, and which of these fields a running workload keeps.

From the project's repository in November 2026:
  Kueue  kubernetes-sigs/kueue pkg/controller/jobs/pod/{constants,pod_webhook,pod_controller}.go, pkg/constants,
         docs/tasks/run/{plain_pods,external_workloads/spark_submit_plain_pod}
"""

import pytest

from rljob_core.children import WORKLOAD_KINDS, build_children
from rljob_core.children.gang import keep_gang
from rljob_core.defaults import DEFAULTS
from tests.support.job_simulation import FUNCTION, make_agent_job, make_job, make_program_job


def make_children(gang, queue=None, **spec):
    scheduling = {"gang": gang, "timeoutSeconds": 100} | ({"queue": queue} if queue else {})
    return build_children(make_job(**{"rollout": {"replicas": 2}, "scheduling": scheduling} | spec), "token", DEFAULTS)


def templates(children):
    return {c["metadata"]["name"]: c["spec"]["template"] for c in children if c["kind"] in WORKLOAD_KINDS}


def test_rollouts_in_the_trainers_pods_are_no_members():
    children = make_children("kueue", "research", rollout={"placement": "trainer"}, trainer={"replicas": 4})
    annotations = [template["metadata"]["annotations"] for template in templates(children).values()]
    counts = [found["kueue.x-k8s.io/pod-group-total-count"] for found in annotations]
    assert counts == ["6"] * 3, "head, four trainers, reward"


def test_pods_of_an_agent_are_members():
    scheduling = {"gang": "kueue", "queue": "research"}
    children = build_children(make_agent_job(user={"replicas": 3}, scheduling=scheduling), "token", DEFAULTS)
    annotations = [template["metadata"]["annotations"] for template in templates(children).values()]
    counts = [found["kueue.x-k8s.io/pod-group-total-count"] for found in annotations]
    assert counts == ["8"] * 6, "head, trainer, rollout, reward, three users and a tool"


def test_pods_of_a_runner_are_members_and_rewards_need_not_exist():
    scheduling = {"gang": "kueue", "queue": "research"}
    children = build_children(make_program_job({"replicas": 2}, scheduling=scheduling), "token", DEFAULTS)
    annotations = [template["metadata"]["annotations"] for template in templates(children).values()]
    counts = [found["kueue.x-k8s.io/pod-group-total-count"] for found in annotations]
    assert counts == ["5"] * 4, "head, trainer, rollout and two runners"


def test_kueue_group_has_labels_and_annotations_of_replaceable_pods():
    children = make_children("kueue", queue="research")
    for template in templates(children).values():
        metadata = template["metadata"]
        assert {
            "kueue.x-k8s.io/queue-name": "research",
            "kueue.x-k8s.io/pod-group-name": "gsm8k",
            "kueue.x-k8s.io/managed": "true",
        }.items() <= metadata["labels"].items()
        assert {
            "kueue.x-k8s.io/pod-group-total-count": "5",
            "kueue.x-k8s.io/pod-suspending-parent": "rljob",
            "kueue.x-k8s.io/retriable-in-group": "false",
        }.items() <= metadata["annotations"].items()
        assert "schedulerName" not in template["spec"], "Kueue adds its own scheduling gate"


def test_pods_of_an_autoscaled_reward_are_queued_one_by_one():
    """Kueue would delete those beyond the group's count."""
    scaled = {"name": "scaled", "function": FUNCTION, "autoscaling": {"minReplicas": 2, "maxReplicas": 8}}
    rewards = [{"name": "correct", "function": FUNCTION}, scaled]
    children = make_children("kueue", queue="research", rewards=rewards)
    in_group = templates(children)
    alone = in_group.pop("gsm8k-reward-scaled")["metadata"]
    assert alone["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert alone["labels"]["kueue.x-k8s.io/managed"] == "true"
    assert alone["annotations"]["kueue.x-k8s.io/pod-suspending-parent"] == "rljob"
    assert "kueue.x-k8s.io/pod-group-name" not in alone["labels"]
    assert not any(name.startswith("kueue.x-k8s.io/pod-group") for name in alone["annotations"])
    assert len(in_group) == 4
    for template in in_group.values():
        assert template["metadata"]["labels"]["kueue.x-k8s.io/pod-group-name"] == "gsm8k"
        assert template["metadata"]["annotations"]["kueue.x-k8s.io/pod-group-total-count"] == "5"


def test_workloads_have_no_kueue_labels():
    for child in make_children("kueue", queue="research"):
        labels = child["metadata"].get("labels") or {}
        assert not any(name.startswith("kueue.x-k8s.io/") for name in labels), child["kind"]


@pytest.mark.parametrize(("before", "after"), [("kueue", "none"), ("none", "kueue"), ("kueue", "gates")])
def test_running_workload_keeps_its_gang_fields(before, after):
    queue = {"kueue": "research", "none": None, "gates": None}
    running = {c["metadata"]["name"]: c for c in make_children(before, queue[before]) if c["kind"] in WORKLOAD_KINDS}
    for child in make_children(after, queue[after]):
        if child["kind"] in WORKLOAD_KINDS:
            old = running[child["metadata"]["name"]]
            assert keep_gang(child, old)["spec"]["template"] == old["spec"]["template"]
