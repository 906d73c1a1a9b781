"""Whatever the API server answers, a job's status says what is wrong, and no workload holds a node."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rljob_core.kube.client import MERGE_PATCH, ApiError
from rljob_core.loop import failures, workqueue
from rljob_core.plan import validate
from rljob_operator.kube import preflight
from tests.integration.apiserver.manifests import put_all, smallest
from tests.integration.apiserver.operator_harness import NAME, Manifest, OperatorHarness, make_ready

ADMISSION = "/apis/admissionregistration.k8s.io/v1"
TRAINER = "spec.trainer.template"
Make = Callable[[OperatorHarness], Awaitable[Callable[[], Awaitable[Any]]]]
"""Makes the API server refuse, and returns what undoes it."""


@pytest.fixture(autouse=True)
def fast_retries(monkeypatch):
    monkeypatch.setattr(preflight, "VERDICT_SECONDS", 0.2)
    monkeypatch.setattr(failures, "FIRST_RETRY_SECONDS", 0.2)
    monkeypatch.setattr(failures, "MAX_RETRY_SECONDS", 1.0)
    monkeypatch.setattr(failures, "REPORT_AFTER_SECONDS", 0.3)
    monkeypatch.setattr(workqueue, "MAX_BACKOFF_SECONDS", 1.0)


async def probe(harness: OperatorHarness, kind: str) -> str:
    """Return why a StatefulSet or Pod of the namespace is refused; empty if it is not."""
    labels = {"a": "b", "rljob.dev/role": "trainer"}
    pod = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "a", "image": "a"}]}}
    spec = {"selector": {"matchLabels": labels}, "serviceName": "a", "template": pod}
    body = pod if kind == "Pod" else {"spec": spec, "metadata": {}}
    body = body | {"metadata": body["metadata"] | {"name": "probe"}}
    try:
        await harness.api.request("POST", harness.path(kind), query={"dryRun": "All"}, body=body)
    except ApiError as error:
        return error.message
    return ""


async def until_refused(harness: OperatorHarness, kind: str, part: str) -> None:
    """Admission reads its configuration through informers."""

    async def is_refused() -> bool:
        return part in await probe(harness, kind)

    await harness.until(f"a refused {kind}", is_refused)


def delete(harness: OperatorHarness, *paths: str) -> Callable[[], Awaitable[None]]:
    async def undo() -> None:
        for path in paths:
            await harness.api.request("DELETE", path)

    return undo


async def create_at(harness: OperatorHarness, path: str, body: Manifest) -> str:
    await harness.api.request("POST", path, body=body)
    return f"{path}/{body['metadata']['name']}"


def policy(group: str, plural: str, kind: str, role: str) -> Make:
    async def make(harness: OperatorHarness) -> Callable[[], Awaitable[None]]:
        rule = {"apiGroups": [group], "apiVersions": ["*"], "operations": ["CREATE", "UPDATE"], "resources": [plural]}
        selector = {"matchLabels": {"kubernetes.io/metadata.name": harness.namespace}}
        constraints = {"resourceRules": [rule], "namespaceSelector": selector}
        constraints["objectSelector"] = {"matchLabels": {"rljob.dev/role": role}} if role else {}
        expression = {"expression": "false", "message": "not in this namespace"}
        spec = {"failurePolicy": "Fail", "matchConstraints": constraints, "validations": [expression]}
        metadata = {"name": harness.namespace}
        binding = {"policyName": harness.namespace, "validationActions": ["Deny"]}
        paths = [
            await create_at(harness, f"{ADMISSION}/validatingadmissionpolicies", {"metadata": metadata, "spec": spec}),
            await create_at(
                harness, f"{ADMISSION}/validatingadmissionpolicybindings", {"metadata": metadata, "spec": binding}
            ),
        ]
        await until_refused(harness, kind, "not in this namespace")
        return delete(harness, *reversed(paths))

    return make


async def break_webhook(harness: OperatorHarness) -> Callable[[], Awaitable[None]]:
    rule = {"apiGroups": ["apps"], "apiVersions": ["*"], "operations": ["*"], "resources": ["statefulsets"]}
    webhook = {
        "name": "gone.example.com",
        "clientConfig": {"url": "https://127.0.0.1:1/"},
        "rules": [rule],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": harness.namespace}},
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "failurePolicy": "Fail",
        "timeoutSeconds": 1,
    }
    body = {"metadata": {"name": harness.namespace}, "webhooks": [webhook]}
    path = await create_at(harness, f"{ADMISSION}/validatingwebhookconfigurations", body)
    await until_refused(harness, "StatefulSet", "failed calling webhook")
    return delete(harness, path)


def quota(hard: dict[str, str], kind: str, used: str = "0") -> Make:
    async def make(harness: OperatorHarness) -> Callable[[], Awaitable[None]]:
        base = f"/api/v1/namespaces/{harness.namespace}/resourcequotas"
        path = await create_at(harness, base, {"metadata": {"name": "team"}, "spec": {"hard": hard}})
        status = {"status": {"hard": hard, "used": dict.fromkeys(hard, used)}}  # no controller runs
        await harness.api.request("PATCH", f"{path}/status", body=status, content_type=MERGE_PATCH)
        await until_refused(harness, kind, "quota")
        return delete(harness, path)

    return make


def limit(**limits: Any) -> Make:
    async def make(harness: OperatorHarness) -> Callable[[], Awaitable[None]]:
        body = {"metadata": {"name": "small"}, "spec": {"limits": [{"type": "Container"} | limits]}}
        path = await create_at(harness, f"/api/v1/namespaces/{harness.namespace}/limitranges", body)
        return delete(harness, path)

    return make


limit_memory = limit(max={"memory": "1Gi"})


async def create_later(harness: OperatorHarness) -> Callable[[], Awaitable[None]]:
    async def undo() -> None:
        await harness.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings"}})
        await harness.create({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "key"}})

    return undo


async def enforce_restricted(harness: OperatorHarness) -> Callable[[], Awaitable[None]]:
    path, label = f"/api/v1/namespaces/{harness.namespace}", "pod-security.kubernetes.io/enforce"

    async def set_label(value: str | None) -> None:
        body = {"metadata": {"labels": {label: value}}}
        await harness.api.request("PATCH", path, body=body, content_type=MERGE_PATCH)

    await set_label("restricted")
    await until_refused(harness, "Pod", "PodSecurity")
    return lambda: set_label(None)


async def do_nothing(harness: OperatorHarness) -> Callable[[], Awaitable[None]]:
    return delete(harness)


PRIVILEGED = {
    "spec": {
        "containers": [{"name": "trainer", "securityContext": {"privileged": True, "allowPrivilegeEscalation": True}}]
    }
}
MEMORY = {"limits": {"memory": "2Gi"}}
FROM_SECRET = [{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "key", "key": "k"}}}]
READS = {"spec": {"containers": [{"name": "trainer", "env": FROM_SECRET}]}}
MOUNTS = {"spec": {"volumes": [{"name": "settings", "configMap": {"name": "settings"}}]}}

REFUSED: dict[str, tuple[Make, Manifest, str, str]] = {
    # what refuses, changes of the job, reason of the condition Running, parts of its message
    "policy on workloads": (
        policy("apps", "statefulsets", "StatefulSet", ""),
        {},
        "Forbidden",
        "not in this namespace",
    ),
    "policy on Pods": (
        policy("", "pods", "Pod", "trainer"),
        {},
        "FailedCreate",
        "trainer: the API server rejects its Pods: ValidatingAdmissionPolicy |"
        f"not in this namespace; create what is missing, or change the policy that it names, or {TRAINER}",
    ),
    "PodSecurity": (
        enforce_restricted,
        {"trainer.template": PRIVILEGED},
        "FailedCreate",
        f"violates PodSecurity |, or {TRAINER}",
    ),
    "LimitRange": (
        limit_memory,
        {"trainer.resources": MEMORY},
        "LimitRange",
        "maximum memory usage per |limit is 2Gi; set requests and limits in spec.trainer.resources",
    ),
    "default of a LimitRange below our own": (
        limit(default={"memory": "600Mi"}, defaultRequest={"memory": "1Mi"}),
        {},
        "LimitRange",
        "must be less than or equal to memory limit of 600Mi|requests and limits in spec.{trainer,rollout}.resources",
    ),
    "quota below one Pod": (
        quota({"requests.memory": "1000Mi"}, "Pod"),
        {},
        "QuotaExceeded",
        "trainer, rollout: exceeds quota team with requests.memory=1Gi; raise the namespace's ResourceQuota",
    ),
    "quota of what the Pods do not set": (
        quota({"limits.cpu": "1000"}, "Pod"),
        {},
        "QuotaUnspecified",
        "trainer: quota team requires limits.cpu; set them in spec.trainer.resources",
    ),
    "Secret and ConfigMap": (
        create_later,
        {"trainer.template": READS, "head.template": MOUNTS},
        "ReferenceMissing",
        f"{TRAINER}.spec.containers[0].env[0].valueFrom.secretKeyRef.name: Secret key does not exist; create it|"
        "spec.head.template.spec.volumes[0].configMap.name: ConfigMap settings does not exist",
    ),
    "service account": (
        do_nothing,
        {"rollout.template": {"spec": {"serviceAccountName": "none"}}},
        "FailedCreate",
        'rollout: the API server rejects its Pods: |serviceaccount "none" not found; create what is missing',
    ),
    "priority class": (
        do_nothing,
        {"rewards.0.template": {"spec": {"priorityClassName": "none"}}},
        "FailedCreate",
        "no PriorityClass with name none was found; create what is missing|or spec.rewards[0].template",
    ),
    "runtime class": (
        do_nothing,
        {"runtimeClassName": "zz"},
        "FailedCreate",
        'RuntimeClass "zz" not found; create what is missing',
    ),
    "count quota": (
        quota({"count/statefulsets.apps": "0"}, "StatefulSet"),
        {},
        "Forbidden",
        "the namespace's quota is exceeded; raise its ResourceQuota",
    ),
    "webhook that is down": (
        break_webhook,
        {},
        "ApiServerError",
        'an admission webhook does not answer; repair or remove it|"gone.example.com"',
    ),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_job_waits_with_the_reason_and_without_a_workload_until_it_is_admitted(harness, case):
    make, changes, reason, parts = REFUSED[case]
    undo = await make(harness)
    await harness.start()
    await harness.create(put_all(smallest(), changes))
    failed = await harness.until_condition("ReconcileFailed")
    running = await harness.condition("Running")
    assert (running["status"], running["reason"], failed["reason"]) == ("False", reason, reason)
    assert (await harness.get("RLJob", NAME))["status"]["phase"] == "Pending"
    for part in parts.split("|"):
        assert part in running["message"]
    assert len(await harness.until_event(reason)) == 1
    assert await harness.workloads() == []
    await undo()
    if case in ("service account", "priority class", "runtime class"):
        role = next(iter(changes)).replace(".0.", ".").split(".")[0]
        fixed = {"rewards": smallest()["spec"]["rewards"]} if role == "rewards" else {role: None}
        await harness.patch("RLJob", NAME, {"spec": fixed})
    await harness.until_all_workloads()

    async def is_cleared() -> bool:
        return not await harness.condition("ReconcileFailed")

    await harness.until("the end of ReconcileFailed", is_cleared)


async def test_pod_quota_is_left_to_the_controllers(harness):
    await quota({"pods": "1"}, "Pod", used="1")(harness)
    await harness.start()
    await harness.create(smallest())
    await harness.until_all_workloads()


async def test_emoji_of_a_function_reaches_its_config_map(harness):
    await harness.start()
    function = 'def compute_score(*a, **b):\n    return "\U0001f600" in a[1]\n'
    await harness.create(put_all(smallest(), {"rewards.0.function": {"inline": function}}))
    await harness.until_all_workloads()
    found = [item for item in await harness.list("ConfigMap") if "\U0001f600" in str(item["data"])]
    assert found


ROLES = {"head": "head", "trainer": "trainer", "rollout": "rollout", "reward": "rewards.0"}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    ("template", "field", "message"),
    [
        ({"spec": {"nodeSelectr": {"a": "b"}}}, "", ".spec.nodeSelectr: field not declared in schema"),
        ({"spec": {"containers": [{"name": "main", "imge": "x"}]}}, "", ".imge: field not declared in schema"),
        ({"spec": {"dnsPolicy": "Cluster"}}, "spec.dnsPolicy", "Unsupported value"),
        ({"metadata": {"annotations": {"a": "x" * 300_000}}}, "metadata.annotations", "Too long"),
    ],
)
async def test_refused_template_names_its_field_when_the_checks_do_not_know_it(
    harness, monkeypatch, role, template, field, message
):
    """As on a cluster whose version differs from that of the checks."""
    monkeypatch.setattr(validate, "find_pod_problems", lambda children, roles: ())
    await harness.start()
    template = json.loads(json.dumps(template).replace('"main"', f'"{role}"'))
    await harness.create(put_all(smallest(), {f"{ROLES[role]}.template": template}))
    failed = await harness.until_condition("Failed")
    path = f"spec.{ROLES[role].replace('.0', '[0]')}.template{field and '.'}{field}: "
    assert failed["reason"] == "InvalidSpec"
    assert failed["message"].startswith(path), failed
    assert message in failed["message"]
    assert await harness.workloads() == []


async def test_job_in_a_namespace_that_is_being_deleted_says_so(harness):
    await harness.create(smallest())
    await harness.api.request("DELETE", f"/api/v1/namespaces/{harness.namespace}")
    await harness.start()
    running = await harness.until_condition("Running", "False")
    assert running["reason"] == "ApiServerError"
    assert "its namespace is being deleted" in running["message"]
    assert await harness.workloads() == []


async def test_reward_model_waits_with_the_reason_and_without_a_workload(harness):
    undo = await limit_memory(harness)
    await harness.start()
    await harness.create(put_all(smallest("RewardModel", "rm"), {"resources": MEMORY}))
    owner = {"kind": "RewardModel", "name": "rm"}
    await harness.until_condition("ReconcileFailed", **owner)
    ready = await harness.condition("Ready", **owner)
    assert (ready["status"], ready["reason"]) == ("False", "LimitRange")
    assert "limit is 2Gi; set requests and limits in spec.resources" in ready["message"]
    assert await harness.workloads() == []
    await undo()

    async def is_cleared() -> bool:
        return not await harness.condition("ReconcileFailed", **owner) and bool(await harness.workloads())

    await harness.until("its Deployment", is_cleared)


CHANGES: list[tuple[Manifest, str, str]] = [
    ({"trainer": {"template": {"spec": {"dnsPolicy": "Cluster"}}}}, "Failed", "spec.trainer.template.spec.dnsPolicy: "),
    ({"head": {"template": {"spec": {"nodeSelectr": {}}}}}, "Failed", "spec.head.template: "),
    ({"head": {"template": {"spec": {"priorityClassName": "none"}}}}, "ReconcileFailed", "spec.head.template"),
    ({"rollout": {"resources": MEMORY, "env": {"A": "1"}}}, "ReconcileFailed", "spec.rollout.resources"),
]


@pytest.mark.parametrize(("change", "condition", "path"), CHANGES)
async def test_running_job_continues_as_it_was_when_a_change_is_refused(harness, monkeypatch, change, condition, path):
    monkeypatch.setattr(validate, "find_pod_problems", lambda children, roles: ())
    await limit_memory(harness)
    await harness.start()
    await harness.create(smallest())
    await harness.until_all_workloads()
    await make_ready(harness)
    await harness.until_condition("Running")
    before = {w["metadata"]["name"]: (w["metadata"]["uid"], w["spec"]) for w in await harness.workloads()}
    await harness.patch("RLJob", NAME, {"spec": change})
    refused = await harness.until_condition(condition)
    assert refused["message"].startswith("generation 2 is not applied: ")
    assert refused["message"].endswith("; generation 1 stays")
    assert path in refused["message"]
    running = await harness.condition("Running")
    assert (running["status"], running["observedGeneration"]) == ("True", 1)
    assert {w["metadata"]["name"]: (w["metadata"]["uid"], w["spec"]) for w in await harness.workloads()} == before
    (role,) = change
    await harness.patch("RLJob", NAME, {"spec": {role: None}})

    async def is_applied() -> bool:
        return (await harness.condition("Running")).get("observedGeneration") == 3 and not (
            await harness.condition("ReconcileFailed")
        )

    await harness.until("generation 3", is_applied)
    assert (await harness.get("RLJob", NAME))["status"]["phase"] == "Running"
