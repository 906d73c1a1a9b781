"""The fields that other schedulers read, and which of these fields a running workload keeps.

From the projects' repositories in November 2026:
  Volcano        volcano-sh/apis pkg/apis/scheduling/v1beta1/{labels,types}.go, volcano cmd/scheduler/app/options
  coscheduling   kubernetes-sigs/scheduler-plugins apis/scheduling/v1alpha1/types.go, its chart as-a-second-scheduler
  Kueue          kubernetes-sigs/kueue pkg/controller/jobs/pod/{constants,pod_webhook,pod_controller}.go, pkg/constants,
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


def pod_groups(children):
    return [child for child in children if child["kind"] == "PodGroup"]


def with_priorities(*names):
    head, trainer, rollout, reward = ({"template": {"spec": {"priorityClassName": name}}} for name in names)
    reward |= {"name": "correct", "function": FUNCTION}
    return {"head": head, "trainer": trainer, "rollout": rollout | {"replicas": 2}, "rewards": [reward]}


def test_volcano_group_has_annotation_and_queue():
    children = make_children("volcano", queue="research")
    (group,) = pod_groups(children)
    assert group["apiVersion"] == "scheduling.volcano.sh/v1beta1"
    spec = dict(group["spec"])
    assert spec.pop("minResources").keys() >= {"cpu", "memory"}
    assert spec == {"minMember": 5, "queue": "research"}
    assert len(templates(children)) == 4
    for template in templates(children).values():
        assert template["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == group["metadata"]["name"]
        assert template["spec"]["schedulerName"] == "volcano"


def test_volcano_group_requests_what_its_pods_request_together():
    def request(**amounts):
        gpus = {"limits": {"nvidia.com/gpu": 8}} if "gpu" in amounts else {}
        requests = {name: amount for name, amount in amounts.items() if name != "gpu"} | {"ephemeral-storage": "1Gi"}
        return {"resources": {"requests": requests} | gpus}

    reward = request(cpu="500m", memory="1Gi") | {"name": "correct", "function": FUNCTION}
    autoscaling = {"minReplicas": 2, "maxReplicas": 9}
    spec = {
        "head": request(cpu="1", memory="2Gi"),
        "trainer": request(cpu="16", memory="100Gi", gpu=8) | {"replicas": 4},
        "rollout": request(cpu="2", memory="1536Mi") | {"replicas": 2},
        "rewards": [reward | {"autoscaling": autoscaling}],
    }
    (group,) = pod_groups(make_children("volcano", **spec))
    assert group["spec"]["minResources"] == {
        "cpu": "70",
        "memory": "407Gi",
        "nvidia.com/gpu": "32",
        "ephemeral-storage": "9Gi",
    }
    assert group["spec"]["minMember"] == 9
    (group,) = pod_groups(make_children("coscheduling"))
    assert "minResources" not in group["spec"], "its scheduler does not read it"


def test_rollouts_in_the_trainers_pods_are_no_members():
    (group,) = pod_groups(make_children("volcano", rollout={"placement": "trainer"}, trainer={"replicas": 4}))
    assert group["spec"]["minMember"] == 6, "head, four trainers, reward"


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


def test_priority_of_an_agents_pods_counts():
    spec = with_priorities("high", "high", "high", "high") | {"scheduling": {"gang": "volcano"}}
    other = {"template": {"spec": {"priorityClassName": "low"}}}
    (group,) = pod_groups(build_children(make_agent_job(tool=other, **spec), "token", DEFAULTS))
    assert "priorityClassName" not in group["spec"]


def test_volcano_group_has_the_priority_that_all_roles_share():
    (group,) = pod_groups(make_children("volcano", **with_priorities("high", "high", "high", "high")))
    assert group["spec"]["priorityClassName"] == "high"
    (group,) = pod_groups(make_children("volcano", **with_priorities("high", "high", "low", "high")))
    assert "priorityClassName" not in group["spec"], "the roles do not agree, so the group has none"


def test_volcano_group_has_the_priority_of_trainers_that_run_the_rollouts():
    roles = with_priorities("high", "high", "unused", "high") | {"rollout": {"placement": "trainer"}}
    (group,) = pod_groups(make_children("volcano", **roles))
    assert group["spec"]["priorityClassName"] == "high"


def test_coscheduling_group_has_the_label():
    children = make_children("coscheduling")
    (group,) = pod_groups(children)
    assert group["apiVersion"] == "scheduling.x-k8s.io/v1alpha1"
    assert group["spec"] == {"minMember": 5, "scheduleTimeoutSeconds": 100}
    for template in templates(children).values():
        assert template["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] == group["metadata"]["name"]
        assert template["spec"]["schedulerName"] == "scheduler-plugins-scheduler"


def test_kueue_group_has_labels_and_annotations_of_replaceable_pods():
    children = make_children("kueue", queue="research")
    assert not pod_groups(children), "the labels of its Pods define the group"
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


@pytest.mark.parametrize("gang", ["volcano", "coscheduling"])
def test_groups_that_are_minimums_count_the_minimum_of_an_autoscaled_reward(gang):
    scaled = {"name": "correct", "function": FUNCTION, "autoscaling": {"minReplicas": 2, "maxReplicas": 8}}
    (group,) = pod_groups(make_children(gang, rewards=[scaled]))
    assert group["spec"]["minMember"] == 6


def test_workloads_have_no_kueue_labels():
    for child in make_children("kueue", queue="research"):
        labels = child["metadata"].get("labels") or {}
        assert not any(name.startswith("kueue.x-k8s.io/") for name in labels), child["kind"]


@pytest.mark.parametrize(("before", "after"), [("kueue", "none"), ("none", "kueue"), ("kueue", "volcano")])
def test_running_workload_keeps_its_gang_fields(before, after):
    queue = {"kueue": "research", "none": None, "volcano": None}
    running = {c["metadata"]["name"]: c for c in make_children(before, queue[before]) if c["kind"] in WORKLOAD_KINDS}
    for child in make_children(after, queue[after]):
        if child["kind"] in WORKLOAD_KINDS:
            old = running[child["metadata"]["name"]]
            assert keep_gang(child, old)["spec"]["template"] == old["spec"]["template"]
