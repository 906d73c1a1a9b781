"""The situations of other people's clusters: policies, queues, refusals, tenants, versions. See `situation`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Callable
from typing import Any

from rljob_core.children.gang import GATE_KUEUE, LABEL_KUEUE_QUEUE
from tests.integration.apiserver import test_refusals
from tests.integration.apiserver.field_policy import install_field_policy
from tests.integration.apiserver.manifests import put_all, smallest
from tests.integration.apiserver.mutating_webhook import Change, run_webhook, use_mirror
from tests.integration.apiserver.operator_harness import NAME, Manifest, create_pods, make_ready
from tests.integration.apiserver.situation import RELEASE, Arrange, Situation, Stage, apply
from tests.integration.apiserver.test_policies import make_invalid, take_over_as_kueue
from tests.integration.apiserver.test_tenants import DEFAULTS, build_policy

RUNNING = ("Running", "True", "Running")
INVALID = ("Failed", "True", "InvalidSpec")
TYPO = {"head.template": {"spec": {"tolerashions": [{"key": "gpu"}]}}}
BEYOND_LIMITS = {
    "trainer.gpusPerReplica": 4,
    "rollout.image": "docker.io/someone/vllm:1",
    "scheduling": {"gang": "kueue", "queue": "prod"},
}


def rewritten(change: Change) -> Arrange:
    """A mutating webhook for workloads."""

    @contextlib.asynccontextmanager
    async def arrange(stage: Stage) -> AsyncIterator[None]:
        async with run_webhook(stage.plane, stage.harness, change):
            yield

    return arrange


def refusing(make: test_refusals.Make) -> Arrange:
    """What makes the API server refuse, of test_refusals."""

    @contextlib.asynccontextmanager
    async def arrange(stage: Stage) -> AsyncIterator[None]:
        undo = await make(stage.harness)
        try:
            yield
        finally:
            await undo()

    return arrange


def governed(policy: Manifest) -> Arrange:
    """An RLJobPolicy of the namespace."""

    @contextlib.asynccontextmanager
    async def arrange(stage: Stage) -> AsyncIterator[None]:
        await stage.create(policy)
        yield

    return arrange


@contextlib.asynccontextmanager
async def with_field_policy(stage: Stage) -> AsyncIterator[None]:
    manifest = install_field_policy(stage.plane, stage.harness.namespace, RELEASE)

    async def is_in_force() -> bool:
        return bool((await apply(stage.harness, put_all(smallest(name="probe"), TYPO), dryRun="All"))[1])

    await stage.harness.until("the policy in force", is_in_force)
    try:
        yield
    finally:
        stage.plane.kubectl("delete", "-f", "-", input=manifest)


def inject_sidecar(workload: Manifest) -> None:
    """As the injectors of meshes do."""
    containers = workload["spec"]["template"]["spec"]["containers"]
    if not any(container["name"] == "proxy" for container in containers):
        containers.append({"name": "proxy", "image": "mesh.example/proxy:1"})


def suspend_jobs(workload: Manifest) -> None:
    """What Kueue does to Jobs without a queue under manageJobsWithoutQueueName."""
    if workload["kind"] == "Job":
        workload["spec"]["suspend"] = True


async def start_pods(stage: Stage) -> None:
    """All Pods of the job run."""
    await make_ready(stage.harness)
    await stage.see_all("Pod")


async def report_suspension(stage: Stage) -> None:
    """As the Job controller does."""
    condition = {"type": "Suspended", "status": "True", "reason": "JobSuspended"}
    await stage.harness.patch_status("Job", f"{NAME}-head", {"conditions": [condition]})
    await stage.see_all("Job")


def hold_pods(queue: str) -> Callable[[Stage], Any]:
    """Kueue's webhook for Pods, in a queue that does not admit them."""

    def hold(pod: Manifest) -> None:
        pod["metadata"]["labels"][LABEL_KUEUE_QUEUE] = queue
        pod["spec"]["schedulingGates"] = [{"name": GATE_KUEUE}]

    async def act(stage: Stage) -> None:
        await create_pods(stage.harness, hold)
        await stage.see_all("Pod")

    return act


async def has_no_workload(stage: Stage) -> None:
    assert await stage.harness.workloads() == [], "no node is held"


async def has_mirror(stage: Stage) -> None:
    for workload in await stage.harness.workloads():
        assert workload["spec"]["template"]["spec"]["containers"][0]["image"].startswith("mirror.example/")


async def has_sidecar(stage: Stage) -> None:
    for workload in await stage.harness.workloads():
        assert workload["spec"]["template"]["spec"]["containers"][-1]["name"] == "proxy"


async def has_defaults(stage: Stage) -> None:
    trainer = await stage.harness.get("StatefulSet", f"{NAME}-trainer")
    assert trainer is not None
    pod = trainer["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == DEFAULTS["trainerImage"]
    assert pod["nodeSelector"] == {"pool": "h100"}


_WAITS = functools.partial(Situation, retries="ever later", check=has_no_workload)
"""The job waits, without a workload, until the cause is repaired."""

SITUATIONS = [
    Situation(
        "a policy rewrites the registry of images, as Kyverno's automatic rules do",
        "lifecycle.md#policies-that-rewrite",
        arrange=rewritten(use_mirror),
        acts=[start_pods],
        condition=RUNNING,
        check=has_mirror,
    ),
    Situation(
        "a webhook adds a sidecar to workloads",
        "lifecycle.md#policies-that-rewrite",
        arrange=rewritten(inject_sidecar),
        acts=[start_pods],
        condition=RUNNING,
        check=has_sidecar,
    ),
    _WAITS(
        "an admission policy rejects a StatefulSet",
        "lifecycle.md#what-the-api-server-refuses",
        arrange=refusing(test_refusals.policy("apps", "statefulsets", "StatefulSet", "")),
        condition=("Running", "False", "Forbidden"),
        says=["an admission policy rejects it; change the policy, or the spec", "not in this namespace"],
    ),
    _WAITS(
        "an admission policy rejects Pods of the trainer",
        "lifecycle.md#what-the-api-server-refuses",
        arrange=refusing(test_refusals.policy("", "pods", "Pod", "trainer")),
        condition=("Running", "False", "FailedCreate"),
        says=[
            "trainer: the API server rejects its Pods: ValidatingAdmissionPolicy ",
            "not in this namespace; create what is missing, or change the policy",
        ],
    ),
    _WAITS(
        "a webhook makes workloads invalid",
        "lifecycle.md#what-the-api-server-refuses",
        arrange=rewritten(make_invalid),
        condition=INVALID,
        says=["dnsPolicy"],
    ),
    _WAITS(
        "a LimitRange allows less memory than a limit of the job",
        "lifecycle.md#what-the-api-server-refuses",
        {"trainer.resources": {"limits": {"memory": "2Gi"}}},
        refusing(test_refusals.limit(max={"memory": "1Gi"})),
        condition=("Running", "False", "LimitRange"),
        says=[
            "trainer: the API server rejects its Pods: maximum memory usage per ",
            "limit is 2Gi; set requests and limits in spec.trainer.resources",
        ],
    ),
    _WAITS(
        "a LimitRange requires more CPU than a role requests",
        "lifecycle.md#what-the-api-server-refuses",
        arrange=refusing(test_refusals.limit(min={"cpu": "500m"})),
        condition=("Running", "False", "LimitRange"),
        says=["head, trainer, rollout, reward-correct: ", "minimum cpu usage per Container is 500m"],
    ),
    _WAITS(
        "a ResourceQuota is smaller than one Pod",
        "lifecycle.md#what-the-api-server-refuses",
        arrange=refusing(test_refusals.quota({"requests.memory": "1000Mi"}, "Pod")),
        condition=("Running", "False", "QuotaExceeded"),
        says=["trainer, rollout: exceeds quota team with requests.memory=1Gi; raise the namespace's ResourceQuota"],
    ),
    _WAITS(
        "a Secret and a ConfigMap are missing",
        "lifecycle.md#what-the-api-server-refuses",
        {"trainer.template": test_refusals.READS, "head.template": test_refusals.MOUNTS},
        condition=("Running", "False", "ReferenceMissing"),
        says=[
            "spec.head.template.spec.volumes[0].configMap.name: ConfigMap settings does not exist",
            "spec.trainer.template.spec.containers[0].env[0].valueFrom.secretKeyRef.name: Secret key does not exist",
        ],
        retries="steadily",
    ),
    Situation(
        "a typo in a Pod template",
        "security.md#fields-that-do-not-exist",
        TYPO,
        with_field_policy,
        refused="spec.head.template.spec.tolerashions is unknown in Kubernetes",
    ),
    Situation(
        "the same without the admission policy (`templatePolicy.unknownFields: off`)",
        "lifecycle.md#failures-and-retries",
        TYPO,
        condition=INVALID,
        says=["spec.head.template.spec.tolerashions"],
        check=has_no_workload,
    ),
    Situation(
        "a typo in another field",
        "reference.md#rljob",
        {"rolout": {"replicas": 2}},
        refused='unknown field "spec.rolout"',
    ),
    Situation(
        "a field of the wrong type",
        "reference.md#rljob",
        {"rollout.replicas": "two"},
        refused="spec.rollout.replicas: Invalid value",
    ),
    Situation(
        "`gang: kueue` with a queue that does not exist",
        "kueue.md#when-a-job-stays-queued",
        {"scheduling": {"gang": "kueue", "queue": "missing"}},
        acts=[hold_pods("missing")],
        condition=("Queued", "True", "WaitingForQuota"),
        says=["queue missing has not admitted the job; see its Kueue Workload smallest"],
    ),
    Situation(
        "a LocalQueue `default`, and Kueue without `externalFrameworks`",
        "lifecycle.md#kueue-and-the-jobs-parts",
        arrange=rewritten(take_over_as_kueue),
        acts=[report_suspension],
        condition=("Running", "False", "SuspendedByKueue"),
        says=["head: Kueue suspends its Job (queue: default)", "integrations.externalFrameworks"],
    ),
    Situation(
        "`manageJobsWithoutQueueName`, and Kueue without `externalFrameworks`",
        "lifecycle.md#kueue-and-the-jobs-parts",
        arrange=rewritten(suspend_jobs),
        acts=[report_suspension],
        condition=("Running", "False", "HeadSuspended"),
        says=["head: its Job is suspended by another", "integrations.externalFrameworks"],
    ),
    Situation(
        "a LocalQueue `default`, Kueue's integration `pod`, and a job without `gang: kueue`",
        "lifecycle.md#kueue-and-the-jobs-parts",
        acts=[hold_pods("default")],
        condition=("Running", "False", "HeldByKueue"),
        says=["Kueue holds its Pods (queue: default)", "set spec.scheduling.gang: kueue"],
    ),
    Situation(
        "an RLJobPolicy limits GPUs, images and queues",
        "tenants.md#limits",
        {
            "trainer.gpusPerReplica": 4,
            "rollout.image": "docker.io/someone/vllm:1",
            "scheduling": {"gang": "kueue", "queue": "prod"},
        },
        governed(build_policy({}, gpus=2, images=["registry.io/research"], queues=["research"])),
        condition=INVALID,
        says=[
            "spec must ask for at most 2 GPUs, got 4",
            "spec.rollout.image",
            "spec.scheduling.queue must be one of research, got prod",
        ],
        check=has_no_workload,
    ),
    Situation(
        "an RLJobPolicy sets defaults",
        "tenants.md#defaults",
        arrange=governed(build_policy(DEFAULTS)),
        acts=[start_pods],
        condition=RUNNING,
        check=has_defaults,
    ),
    Situation(
        "the operator is one minor version older than the CRDs",
        "install.md#upgrade-and-uninstall",
        acts=[start_pods],
        condition=RUNNING,
        crds="newer",
    ),
]
