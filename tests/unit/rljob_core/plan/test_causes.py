"""Each cause of waiting names the field to change, and is reported once."""

from datetime import UTC, datetime

import pytest

from rljob_api.manifest.services.reward import RewardModel
from rljob_core.backend import ChildKey, ObservedState
from rljob_core.plan import conditions
from rljob_core.plan.causes import REMEDIES, find_causes
from rljob_core.plan.job import plan_job
from rljob_core.plan.observed_job import observe_job
from rljob_core.plan.reward_model import plan_reward_model
from tests.support.job_simulation import make_job

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def make_pod(role="rollout", node="", spec=None, **status):
    labels = {"rljob.dev/job": "gsm8k", "rljob.dev/role": role}
    metadata = {"name": f"gsm8k-{role}-x", "labels": labels}
    return {"metadata": metadata, "spec": {"nodeName": node} | (spec or {}), "status": status}


def causes(job, *pods, **observed):
    seen = ObservedState(pods=pods, **observed)
    return find_causes(observe_job(job, seen))


def unscheduled(message):
    return [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}]


def waiting(reason, message="", image="x"):
    state = {"waiting": {"reason": reason, "message": message}}
    return {"containerStatuses": [{"image": image, "state": state}]}


def evicted(message):
    """The kubelet's messages: pkg/kubelet/eviction/helpers.go and eviction_manager.go of Kubernetes 1.35."""
    disruption = {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}
    return {"phase": "Failed", "reason": "Evicted", "message": message, "conditions": [disruption]}


OUT_OF_MEMORY = {"containerStatuses": [{"lastState": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}}]}
NO_NODE = "0/4 nodes are available: 4 node(s) didn't match Pod's node affinity/selector."
NO_ROOM = "0/4 nodes are available: 1 Insufficient nvidia.com/gpu, 3 node(s) had untolerated taint(s)."
PREEMPTION = " preemption: 0/4 nodes are available: 4 Preemption is not helpful for scheduling."
OF_A_POD = [
    (OUT_OF_MEMORY, "OOMKilled", "rollout ran out of memory; raise spec.rollout.resources.limits.memory"),
    ({"phase": "Failed", "reason": "Evicted"}, "Evicted", "backoffLimit is not charged"),
    *(
        (evicted(message), "DiskLimitExceeded", "raise spec.rollout.resources.limits.ephemeral-storage")
        for message in (
            'Usage of EmptyDir volume "scratch" exceeds the limit "20Gi". ',
            "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi. ",
            'Container rollout exceeded its local ephemeral storage limit "1Gi". ',
        )
    ),
    (evicted("The node was low on resource: ephemeral-storage. "), "Evicted", "the Pod is replaced"),
    ({"conditions": [{"type": "DisruptionTarget", "status": "True"}]}, "Evicted", "the Pod is replaced"),
    (
        waiting("ErrImagePull", image="there/is:none"),
        "ImagePull",
        "image there/is:none cannot be pulled; correct spec.rollout.image",
    ),
    (waiting("ErrImageNeverPull"), "ImagePull", "spec.imagePullSecrets"),
    (waiting("InvalidImageName"), "ImagePull", "correct spec.rollout.image"),
    (
        waiting("CreateContainerConfigError", 'secret "wandb" not found'),
        "CreateContainerConfigError",
        'rollout: secret "wandb" not found; create the ConfigMap or Secret that the message names',
    ),
    (
        {"conditions": unscheduled(NO_ROOM)},
        "Unschedulable",
        "compare spec.rollout.nodePool (nodeSelector, tolerations)",
    ),
    (
        {"conditions": unscheduled('persistentvolumeclaim "runs" not found')},
        "VolumeUnbound",
        "create the PersistentVolumeClaim that spec.checkpoint.persistentVolumeClaim.claimName and pvc:// sources",
    ),
    (
        {"conditions": unscheduled("0/4 nodes are available: pod has unbound immediate PersistentVolumeClaims.")},
        "VolumeUnbound",
        "or see why it is not bound",
    ),
]
"""The status of a Pod, the cause, and a part of its remedy."""


@pytest.mark.parametrize(("status", "reason", "text"), OF_A_POD)
def test_cause_of_a_pod_names_its_remedy(status, reason, text):
    (cause,) = causes(make_job(), make_pod(**status))
    assert cause.reason == reason
    assert text in cause.message


def test_unschedulable_cause_names_node_labels_without_preemption_details():
    pod = make_pod(spec={"nodeSelector": {"pool": "h100", "arch": "x"}}, conditions=unscheduled(NO_NODE + PREEMPTION))
    (cause,) = causes(make_job(), pod)
    assert "(it requires nodes with arch=x, pool=h100); compare spec.rollout.nodePool" in cause.message
    assert "preemption" not in cause.message
    (other,) = causes(make_job(), make_pod(spec={"nodeSelector": {"pool": "h100"}}, conditions=unscheduled(NO_ROOM)))
    assert "it requires" not in other.message, "its labels are not the cause"


def test_unbound_claim_is_named():
    claim = {"name": "run", "persistentVolumeClaim": {"claimName": "runs"}}
    pod = make_pod(
        spec={"volumes": [claim]}, conditions=unscheduled("pod has unbound immediate PersistentVolumeClaims")
    )
    assert "(its claims: runs)" in causes(make_job(), pod)[0].message


def test_ready_pod_has_no_cause():
    assert causes(make_job(), make_pod(conditions=[{"type": "Ready", "status": "True"}], **OUT_OF_MEMORY)) == []


def failed_create(about, message):
    return {"reason": "FailedCreate", "message": message, "involvedObject": {"name": about}}


FULL = (
    'pods "{pod}" is forbidden: exceeded quota: team, requested: requests.memory=1Gi, used: requests.memory=96Mi, '
    "limited: requests.memory=512Mi"
)
OF_A_WORKLOAD = [
    ("gsm8k-head", f"Error creating: {FULL}", "QuotaExceeded", "spec.head"),
    ("gsm8k-trainer", f"create Pod p in StatefulSet s failed error: {FULL}", "QuotaExceeded", "spec.trainer"),
    ("gsm8k-rollout-7d9f8c6b5d", f"Error creating: {FULL}", "QuotaExceeded", "spec.rollout"),
    ("gsm8k-reward-correct-5f7b", f"Error creating: {FULL}", "QuotaExceeded", "spec.rewards[0]"),
    (
        "gsm8k-rollout-7d9f8c6b5d",
        'Error creating: pods "{pod}" is forbidden: failed quota: team: must specify limits.cpu,requests.cpu for: r',
        "QuotaUnspecified",
        "spec.rollout",
    ),
    (
        "gsm8k-rollout-7d9f8c6b5d",
        'Error creating: pods "{pod}" is forbidden: violates PodSecurity "restricted:latest": privileged',
        "FailedCreate",
        "spec.rollout",
    ),
]


@pytest.mark.parametrize(("about", "message", "reason", "path"), OF_A_WORKLOAD)
def test_rejected_pod_names_the_field_and_no_generated_name(about, message, reason, path):
    first, second = (
        causes(make_job(), warnings=(failed_create(about, message.format(pod=f"{about}-{end}")),)) for end in "ab"
    )
    assert first == second
    assert [cause.reason for cause in first] == [reason]
    assert path in first[0].message


def test_quota_cause_names_the_resources():
    text = {
        reason: causes(make_job(), warnings=(failed_create(about, message),))[0].message
        for about, message, reason, _ in OF_A_WORKLOAD
    }
    assert "exceeds quota team with requests.memory=1Gi; raise the namespace's ResourceQuota" in text["QuotaExceeded"]
    assert (
        "quota team requires limits.cpu, requests.cpu; set them in spec.rollout.resources" in text["QuotaUnspecified"]
    )


def test_deployment_condition_counts_before_older_events():
    failing = {"type": "ReplicaFailure", "status": "True", "message": FULL}
    owner = [{"uid": "u1", "controller": True}]
    child = {
        "kind": "Deployment",
        "metadata": {"name": "gsm8k-rollout", "ownerReferences": owner},
        "status": {"conditions": [failing]},
    }
    old = failed_create("gsm8k-rollout-7d9f", "Error creating: something else")
    found = causes(make_job(), children={ChildKey("Deployment", "gsm8k-rollout"): child}, warnings=(old,))
    assert [cause.reason for cause in found] == ["QuotaExceeded"]


def test_existing_pods_have_no_rejection():
    pods = [make_pod(role) for role in ("head", "trainer", "rollout")]
    warning = failed_create("gsm8k-rollout-7d9f", f"Error creating: {FULL}")
    assert causes(make_job(), *pods, warnings=(warning,)) == [], "an Event outlives its cause"


def test_failed_mount_is_reported_while_the_pod_waits():
    message = 'MountVolume.SetUp failed for volume "config" : configmap "mine" not found'
    warning = {"reason": "FailedMount", "message": message, "involvedObject": {"name": "gsm8k-rollout-x"}}
    (cause,) = causes(make_job(), make_pod(), warnings=(warning,))
    assert cause.reason == "FailedMount"
    assert 'configmap "mine" not found; create the ConfigMap, Secret or volume that the message names' in cause.message
    ready = make_pod(conditions=[{"type": "Ready", "status": "True"}])
    assert causes(make_job(), ready, warnings=(warning,)) == []


CLAIMS = {"volumes": [{"name": "claim-0", "persistentVolumeClaim": {"claimName": "runs"}}]}


def test_claim_that_another_node_holds_is_named_and_no_generated_name():
    messages = [
        'Multi-Attach error for volume "pvc-1" Volume is already used by pod(s) sums-head-abc',
        'Multi-Attach error for volume "pvc-1" Volume is already exclusively attached to one node',
    ]
    pod = make_pod(spec=CLAIMS)
    warnings = [
        {"reason": "FailedAttachVolume", "message": message, "involvedObject": {"name": pod["metadata"]["name"]}}
        for message in messages
    ]
    found = [causes(make_job(), pod, warnings=(warning,)) for warning in warnings]
    assert found[0] == found[1]
    ((reason, message),) = found[0]
    assert (reason, message.partition(";")[0]) == (
        "VolumeHeld",
        "rollout: a volume is attached to another node (its claims: runs)",
    )
    assert "ReadWriteMany" in message
    assert causes(make_job(), make_pod(), warnings=(warnings[0] | {"message": "timed out"},)) == []


@pytest.mark.parametrize(
    "message",
    [
        "0/2 nodes are available: 1 node(s) had volume node affinity conflict.",
        "0/2 nodes are available: 2 node(s) didn't match PersistentVolume's node affinity.",
        "0/2 nodes are available: 1 node has pod using PersistentVolumeClaim with the same name and ReadWriteOncePod "
        "access mode.",
    ],
)
def test_volume_of_another_node_is_no_lack_of_nodes(message):
    (cause,) = causes(make_job(), make_pod(spec=CLAIMS, conditions=unscheduled(message)))
    assert cause.reason == "VolumeHeld"
    assert "(its claims: runs)" in cause.message


def test_image_that_cannot_be_pulled_names_the_missing_pull_secret():
    pod = make_pod(**waiting("ErrImagePull", image="there/is:none"))
    message = "Unable to retrieve some image pull secrets (registry); attempting to pull the image may not succeed."
    warning = {"reason": "FailedToRetrieveImagePullSecret", "message": message}
    warning["involvedObject"] = {"name": pod["metadata"]["name"]}
    (cause,) = causes(make_job(), pod, warnings=(warning,))
    assert cause.reason == "ImagePull"
    assert "cannot be pulled, and the Secret registry of imagePullSecrets does not exist; correct" in cause.message
    assert causes(make_job(), make_pod(), warnings=(warning,)) == [], "the image may be public"


def test_slow_kubelet_is_not_a_cause():
    message = 'MountVolume.SetUp failed for volume "config" : failed to sync configmap cache: timed out waiting for x'
    warning = {"reason": "FailedMount", "message": message, "involvedObject": {"name": "gsm8k-rollout-x"}}
    assert causes(make_job(), make_pod(), warnings=(warning,)) == [], "nothing is missing"


SHARED = [{"name": "style", "rewardModelRef": {"name": "judge"}}]


def make_model(reason=None, **spec):
    model = {"metadata": {"name": "judge", "uid": "u2"}, "spec": {"function": {"inline": "def reward(): ..."}} | spec}
    ready = {"type": "Ready", "status": "False", "reason": reason, "lastTransitionTime": NOW}
    return RewardModel.model_validate(model | ({"status": {"conditions": [ready]}} if reason else {}))


@pytest.mark.parametrize(
    ("reason", "reported"), [(None, False), ("WaitingForPods", False), ("FunctionFailed", True), ("NoReplicas", True)]
)
def test_unready_reward_model_is_reported_to_its_jobs(reason, reported):
    found = causes(make_job(rewards=SHARED), reward_models={"judge": make_model(reason)})
    assert [cause.reason for cause in found] == (["RewardModelNotReady"] if reported else [])
    if reported:
        assert f"reward style: RewardModel judge is not ready ({reason})" in found[0].message
        assert "spec.rewards[0].rewardModelRef" in found[0].message


def make_model_pod(**status):
    labels = {"rljob.dev/reward-model": "judge", "rljob.dev/role": "reward"}
    return {"metadata": {"name": "judge-rewardmodel-x", "labels": labels}, "spec": {}, "status": status}


def crashed(code, message):
    last = {"terminated": {"exitCode": code, "message": message}}
    state = {"waiting": {"reason": "CrashLoopBackOff"}}
    return {"containerStatuses": [{"name": "reward", "lastState": last, "state": state}]}


def model_plan(pod, model=None):
    return plan_reward_model(model or make_model(), ObservedState(pods=(pod,)), NOW, new_token=lambda: "t")


def test_model_reports_the_error_of_a_function_that_fails_on_import():
    made = model_plan(make_model_pod(**crashed(78, "error: function.py:3: RuntimeError: no corpus")))
    (event,) = made.events
    assert (event.type, event.reason) == ("Warning", "FunctionFailed")
    assert "function.py:3: RuntimeError: no corpus; fix spec.function or the ConfigMap it references" in event.message
    for condition in (c for c in made.status.conditions if c.type in ("Ready", "Degraded")):
        assert condition.reason == "FunctionFailed"
        assert event.message in condition.message
    again = model_plan(
        make_model_pod(**crashed(78, "error: function.py:3: RuntimeError: no corpus")),
        make_model().model_copy(update={"status": made.status}),
    )
    assert again.events == (), "reported once"


def test_model_pods_have_the_same_causes_as_job_pods():
    made = model_plan(make_model_pod(**waiting("ImagePullBackOff", image="there/is:none")))
    assert [event.reason for event in made.events] == ["ImagePull"]
    assert "correct spec.image" in made.events[0].message
    made = model_plan(make_model_pod(conditions=unscheduled(NO_ROOM)))
    assert "compare spec.nodePool" in made.events[0].message


def test_new_model_emits_no_warning_while_its_pods_start():
    assert model_plan(make_model_pod()).events == ()


def test_every_remedy_is_tested():
    tried = {reason for _, reason, _ in OF_A_POD} | {reason for _, _, reason, _ in OF_A_WORKLOAD}
    others = {"SuspendedByKueue", "HeadSuspended", "HeldByKueue"}
    others |= {"FailedMount", "RewardModelMissing", "RewardModelNotReady", "FunctionFailed"}
    others |= {"VolumeHeld", "LimitRange", "ReferenceMissing"}  # before there is a workload: test_rejections
    assert tried | others == set(REMEDIES)


def test_quota_cause_is_stable_between_pods():
    def warning(pod, used):
        message = f'Error creating: pods "{pod}" is forbidden: exceeded quota: q, requested: cpu=1, used: cpu={used}'
        return {"reason": "FailedCreate", "message": message, "involvedObject": {"name": "gsm8k-rollout-7d9f"}}

    first, second = (causes(make_job(), warnings=(warning(p, u),)) for p, u in (("a", 1), ("b", 2)))
    assert first == second
    assert first[0].reason == "QuotaExceeded"
    assert "exceeds quota q with cpu=1" in first[0].message


def test_missing_reward_model_is_reported_once_and_in_the_condition():
    job = make_job(rewards=[{"name": "style", "rewardModelRef": {"name": "judge"}}])
    made = plan_job(job, ObservedState(), NOW, new_token=lambda: "t")
    assert [event.reason for event in made.events] == ["RewardModelMissing"]
    assert "spec.rewards[0].rewardModelRef" in conditions.find(made.status, "Running").message
    job.status = made.status
    assert plan_job(job, ObservedState(), NOW, new_token=lambda: "t").events == ()


def test_causes_survive_the_message_limit_and_emit_one_event():
    job = make_job(trainer={"replicas": 4}, rollout={"replicas": 4})
    pods = [make_pod(role, conditions=unscheduled(NO_ROOM * 2)) for role in ("head", *["trainer", "rollout"] * 4)]
    pods = tuple(pod | {"metadata": pod["metadata"] | {"name": f"pod-{i}"}} for i, pod in enumerate(pods))
    made = plan_job(job, ObservedState(pods=pods), NOW, new_token=lambda: "t")
    assert [event.reason for event in made.events] == ["Unschedulable"] * 3
    message = conditions.find(made.status, "Running").message
    assert len(message) == conditions.MAX_MESSAGE_LENGTH, "the message must reach the limit"
    assert message.startswith("waits for 1 of 1 head Pod")
    job.status = made.status
    assert plan_job(job, ObservedState(pods=pods), NOW, new_token=lambda: "t").events == ()


def test_cause_hidden_by_a_blocked_name_is_reported_when_it_is_free():
    job = make_job(rewards=[{"name": "style", "rewardModelRef": {"name": "judge"}}])
    earlier = {"kind": "Secret", "metadata": {"name": "gsm8k-token", "ownerReferences": [{"uid": "u0"}]}}
    blocked = ObservedState(children={ChildKey("Secret", "gsm8k-token"): earlier})
    for _ in range(2):
        made = plan_job(job, blocked, NOW, new_token=lambda: "t")
        assert made.events == (), "no condition contains it, so it would be reported every second"
        job.status = made.status
    assert [e.reason for e in plan_job(job, ObservedState(), NOW, new_token=lambda: "t").events] == [
        "RewardModelMissing"
    ]


QUEUED = {"kueue.x-k8s.io/queue-name": "default"}


def make_head_job(suspend=True, **labels):
    owners = [{"uid": make_job().metadata.uid}]
    metadata = {"name": "gsm8k-head", "namespace": "default", "labels": labels, "ownerReferences": owners}
    return {ChildKey("Job", "gsm8k-head"): {"kind": "Job", "metadata": metadata, "spec": {"suspend": suspend}}}


@pytest.mark.parametrize(
    ("labels", "reason", "part"),
    [
        (QUEUED, "SuspendedByKueue", "(queue: default)"),
        ({}, "HeadSuspended", 'kubectl patch job -n default gsm8k-head --type=merge -p \'{"spec":{"suspend":false}}\''),
    ],
)
@pytest.mark.parametrize("gang", [{"gang": "none"}, {"gang": "kueue", "queue": "research"}])
def test_head_that_another_suspends_is_a_cause_with_its_remedy(labels, reason, part, gang):
    job = make_job(scheduling=gang)
    (cause,) = causes(job, children=make_head_job(**labels))
    assert cause.reason == reason
    assert part in cause.message
    assert "xternal" in cause.message, "the remedy if it was Kueue"
    assert causes(job, children=make_head_job(suspend=False, **labels)) == []


def test_head_that_the_operator_suspended_after_its_failures_is_no_cause():
    job, failed = make_job(), {"type": "Failed", "status": "True", "reason": "HeadFailed", "message": "m"}
    status = {"conditions": [failed | {"lastTransitionTime": "2026-01-01T00:00:00Z"}]}
    job = type(job).model_validate(job.model_dump(by_alias=True, exclude_unset=True) | {"status": status})
    assert causes(job, children=make_head_job()) == []


def test_pods_that_kueue_queues_alone_are_a_cause_without_its_gang():
    spec = {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}
    pod = make_pod(spec=spec)
    pod["metadata"]["labels"] |= QUEUED
    (cause,) = causes(make_job(), pod)
    assert cause.reason == "HeldByKueue"
    assert "rollout: Kueue holds its Pods (queue: default); set spec.scheduling.gang" in cause.message
    assert causes(make_job(scheduling={"gang": "kueue", "queue": "research"}), pod) == []
