"""Several versions of a reward at once: how they are distinguished and reported."""

from datetime import UTC, datetime, timedelta

import pytest

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.services.reward import RewardModel
from rljob_api.wire.contract import ENV_REWARD_IMAGES
from rljob_api.wire.driver_status import RewardDemand
from rljob_core.backend import Demand, ObservedState, key_of
from rljob_core.plan import conditions
from rljob_core.plan.job import plan_job
from rljob_core.plan.reward_model import plan_reward_model
from rljob_core.plan.reward_versions import count_versions, describe_counts, describe_update
from tests.support import job_simulation

NOW = datetime(2026, 1, 1, tzinfo=UTC)
OLD, NEW = "def reward(): return 0", "def reward(): return 1"
QUOTA = 'pods "x" is forbidden: exceeded quota: team, requested: pods=1, used: pods=2, limited: pods=2'


def make_job(source=NEW, **spec):
    rewards = [{"name": "correct", "replicas": 2, "function": {"inline": source}}]
    return job_simulation.make_job(**{"rewards": rewards} | spec)


def make_model(source=NEW, status=None, **spec):
    metadata = {"name": "math", "namespace": "ns", "uid": "u2"}
    content = {"function": {"inline": source}, "replicas": 2} | spec
    return RewardModel.model_validate({"metadata": metadata, "spec": content, "status": status or {}})


def deployment_of(owner):
    make = plan_job if isinstance(owner, RLJob) else plan_reward_model
    children = make(owner, ObservedState(), NOW, new_token=lambda: "t").children
    names = ("gsm8k-reward-correct", "math-rewardmodel")
    return next(c for c in children if c["kind"] == "Deployment" and c["metadata"]["name"] in names)


def pod_of(owner, name="p", *, ready=True):
    """A Pod of the owner's template, changed by a webhook that mirrors images and adds a container."""
    template = deployment_of(owner)["spec"]["template"]
    container = template["spec"]["containers"][0]
    containers = [container | {"image": f"mirror/{name}"}, {"name": "injected", "image": f"mesh:{name}"}]
    return {
        "kind": "Pod",
        "metadata": template["metadata"] | {"name": name},
        "spec": template["spec"] | {"containers": containers},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": str(ready)}]},
    }


def reconcile(owner, *pods, children=(), **observed):
    """Reconcile once. Returns the plan and the owner with its stored status."""
    make = plan_job if isinstance(owner, RLJob) else plan_reward_model
    known = make(owner, ObservedState(), NOW, new_token=lambda: "t").children
    seen = ObservedState({key_of(child): child for child in [*known, *children]}, pods, **observed)
    made = make(owner, seen, NOW)
    return made, owner.model_copy(update={"status": made.status})


def condition(status, type_):
    return next((c for c in status.conditions if c.type == type_), None)


@pytest.mark.parametrize(
    ("owner", "rolling"),
    [
        (make_job(), {"maxSurge": "25%", "maxUnavailable": 0}),
        (make_model(), {"maxSurge": "25%", "maxUnavailable": 0}),
        (
            make_job(scheduling={"gang": "kueue", "queue": "q"}),
            {"maxSurge": 0, "maxUnavailable": 1},
        ),
    ],
)
def test_rolling_update_surges_except_under_kueue(owner, rolling):
    assert deployment_of(owner)["spec"]["strategy"] == {"type": "RollingUpdate", "rollingUpdate": rolling}


def test_user_template_applies_to_updated_pods():
    template = {"spec": {"terminationGracePeriodSeconds": 7, "containers": [{"name": "reward", "image": "mine"}]}}
    spec = deployment_of(make_model(template=template))["spec"]
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] == 7
    assert spec["template"]["spec"]["containers"][0]["image"] == "mine"
    assert spec["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


def test_only_source_and_image_change_the_version():
    same = [pod_of(make_job(), name) for name in "abc"]
    same.append(pod_of(make_job(rollout={"replicas": 3}), "d"))
    assert list(count_versions(same).values()) == [4], "a webhook's changes do not change the version"
    others = [pod_of(make_job(OLD), "x"), pod_of(with_image("another"), "y")]
    assert sorted(count_versions([*same, *others]).values()) == [1, 1, 4]
    resources = {"name": "correct", "function": {"inline": NEW}, "resources": {"limits": {"cpu": "2"}}}
    assert len(count_versions([*same, pod_of(make_job(rewards=[resources]), "e")])) == 1


def test_mixed_versions_condition_emits_one_event_at_start_and_end():
    job = make_job()
    old, new = [pod_of(make_job(OLD), name) for name in "ab"], [pod_of(job, name) for name in "cd"]
    _, job = reconcile(job, *old)
    assert condition(job.status, conditions.REWARD_VERSIONS_MIXED) is None, "there is only one version"
    _, job = reconcile(job, *old, pod_of(make_job(), "c", ready=False))
    assert condition(job.status, conditions.REWARD_VERSIONS_MIXED) is None, "the new one does not serve"
    started, job = reconcile(job, *old, new[0])
    found = condition(job.status, conditions.REWARD_VERSIONS_MIXED)
    assert (found.status, found.reason) == ("True", "MixedVersions")
    counts = describe_counts(count_versions([*old, new[0]]))
    assert found.message == f"reward correct: {counts}; each step is scored by one version only"
    assert "2 " in counts, "of the old version"
    assert [(e.type, e.reason) for e in started.events if "version" in e.message] == [("Normal", "MixedVersions")]
    continued, job = reconcile(job, old[0], *new)
    assert [e for e in continued.events if "version" in e.message] == [], "reported once"
    ended, job = reconcile(job, *new)
    found = condition(job.status, conditions.REWARD_VERSIONS_MIXED)
    assert (found.status, found.reason) == ("False", "SingleVersion")
    assert [(e.type, e.reason) for e in ended.events if "version" in e.message] == [("Normal", "SingleVersion")]
    idle, again = reconcile(job, *new)
    assert (idle.events, again.status) == ((), job.status)


def with_image(image, **more):
    return make_job(rewards=[{"name": "correct", "function": {"inline": NEW}, "image": image}], **more)


def test_versions_that_differ_only_in_image_are_named_by_it():
    made, _ = reconcile(with_image("mine:1"), pod_of(with_image("mine:1"), "a"), pod_of(with_image("mine:2"), "b"))
    message = condition(made.status, conditions.REWARD_VERSIONS_MIXED).message
    assert "(mine:1)" in message
    assert "(mine:2)" in message
    assert message.endswith("each step is scored by one version only")


def test_server_env_has_the_images_of_the_merged_template_and_sidecar():
    template = {"spec": {"containers": [{"name": "reward", "image": "mine"}, {"name": "more", "image": "other"}]}}
    model = make_model(function=None, model={"source": "/m", "image": "vllm:1"}, template=template)
    (server,) = (c for c in deployment_of(model)["spec"]["template"]["spec"]["containers"] if c["name"] == "reward")
    assert {"name": ENV_REWARD_IMAGES, "value": "vllm:1 mine"} in server["env"]


def test_model_is_updating_until_the_last_old_pod_is_deleted():
    model = make_model()
    old, new = [pod_of(make_model(OLD), name) for name in "ab"], [pod_of(model, name) for name in "cd"]
    seen = []
    for pods in (old, [*old, pod_of(model, "c", ready=False)], [*old, new[0]], [old[0], *new], new, new):
        made, model = reconcile(model, *pods)
        found = condition(model.status, "Updating")
        seen.append((found.status, found.reason, [event.reason for event in made.events if "Pods" in event.message]))
    assert seen == [
        ("True", "RollingOut", ["RollingOut"]),
        ("True", "RollingOut", []),
        ("True", "MixedVersions", []),
        ("True", "MixedVersions", []),
        ("False", "SingleVersion", ["Updated"]),
        ("False", "SingleVersion", []),
    ]


def test_surge_pods_of_an_update_are_not_scaling():
    model, status = make_model(), {"status": {"replicas": 3, "readyReplicas": 3}}
    pods = [pod_of(make_model(OLD), "a"), pod_of(make_model(OLD), "b"), pod_of(model, "c")]
    made, _ = reconcile(model, *pods, children=[deployment_of(model) | status])
    assert condition(made.status, "Scaling").status == "False"
    assert condition(made.status, "Ready").message == "2 of 2 Pods are ready"
    later, _ = reconcile(model, *pods[2:], children=[deployment_of(model) | status])
    assert condition(later.status, "Scaling").reason == "ScalingDown"


def test_update_reports_why_its_first_pod_cannot_be_created():
    model = make_model()
    failing = {"conditions": [{"type": "ReplicaFailure", "status": "True", "message": QUOTA}], "readyReplicas": 2}
    made, _ = reconcile(
        model,
        *(pod_of(make_model(OLD), name) for name in "ab"),
        children=[deployment_of(model) | {"status": failing}],
    )
    found = condition(made.status, "Updating")
    assert (found.status, found.reason) == ("True", "RollingOut")
    assert "exceeds quota team with pods=1; raise the namespace's ResourceQuota" in found.message
    assert "QuotaExceeded" in [event.reason for event in made.events]


def test_no_update_without_pods():
    assert describe_update([], deployment_of(make_model())["spec"]["template"]) is None


@pytest.mark.parametrize(
    ("spec", "ready", "endpoints"),
    [
        ({}, 1, ["math-rewardmodel.ns.svc:8080"]),
        ({}, 0, []),
        ({"function": None, "http": {"url": "https://x/score"}}, 0, ["https://x/score"]),
    ],
)
def test_model_endpoints_are_the_ready_ones(spec, ready, endpoints):
    model = make_model(**spec)
    served = [deployment_of(model) | {"status": {"readyReplicas": ready}}] if model.spec.is_served else []
    assert reconcile(model, children=served)[0].status.endpoints == endpoints


def test_p95_is_the_slowest_jobs_and_ignores_small_changes():
    model, written = make_model(), []
    for seconds in ([1.2345, 0.5], [1.3], [1.357, None], [1.4], [], [None], [0.5]):
        demands = tuple(Demand(f"j{i}", RewardDemand(latency_p95_seconds=s)) for i, s in enumerate(seconds))
        _, model = reconcile(model, demands=(*demands, Demand("silent", None)))
        written.append(model.status.latency_p95_seconds)
    assert written == [1.23, 1.23, 1.36, 1.36, 1.36, 1.36, 0.5]


def test_fixed_model_is_requeued_only_while_a_job_runs():
    running = (Demand("j", RewardDemand()),)
    assert reconcile(make_model(), demands=running)[0].requeue_after_seconds == 30.0
    assert reconcile(make_model())[0].requeue_after_seconds is None


def test_terminating_pod_has_no_version():
    gone = pod_of(make_model(OLD), "a")
    gone["metadata"] = gone["metadata"] | {"deletionTimestamp": (NOW + timedelta(seconds=5)).isoformat()}
    made, _ = reconcile(make_model(), gone, pod_of(make_model(), "b"))
    assert condition(made.status, "Updating").status == "False"
