"""Policies that rewrite what the operator applies: no fight, no failure; and edits by others are still set back."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from rljob_core.kube.client import STRATEGIC_MERGE_PATCH
from tests.integration.apiserver.manifests import put_all, smallest
from tests.integration.apiserver.mutating_webhook import WORKLOADS, run_webhook, use_mirror
from tests.integration.apiserver.operator_harness import NAME, Manifest, OperatorHarness, WriteRecorder

PLURALS = [plural for plurals in WORKLOADS.values() for plural in plurals]
MIRROR = "mirror.example/"
DEPLOYMENT = f"{NAME}-rollout"


def pods_container(workload: Manifest) -> Manifest:
    container: Manifest = workload["spec"]["template"]["spec"]["containers"][0]
    return container


def use_mirror_and_drop_a_variable(workload: Manifest) -> None:
    use_mirror(workload)
    container = pods_container(workload)
    container["env"] = [each for each in container.get("env", []) if each["name"] != "RLJOB_POD_IP"]


async def until_settled(harness: OperatorHarness, recorder: WriteRecorder) -> None:
    """Reconciles write nothing."""
    await harness.wait_for_resyncs()
    before = list(recorder.writes)
    await harness.wait_for_resyncs()
    assert recorder.writes == before, "reconciles of a settled job write nothing"


@pytest.mark.parametrize(
    ("change", "operations"), [(use_mirror_and_drop_a_variable, ("CREATE", "UPDATE")), (use_mirror, ("CREATE",))]
)
async def test_policy_that_rewrites_workloads_costs_no_write_and_no_failure(harness, control_plane, operations, change):
    recorder = WriteRecorder()
    async with run_webhook(control_plane, harness, change, operations=operations):
        await harness.start(recorder, resync_seconds=0.4)
        await harness.create(smallest())
        await harness.until_all_workloads()
        await until_settled(harness, recorder)
        created = {w["metadata"]["name"]: w for w in await harness.workloads()}
        await harness.patch("RLJob", NAME, {"spec": {"rollout": {"replicas": 3}, "ttlSecondsAfterFinished": 9}})

        async def is_scaled() -> bool:
            return bool((await harness.get("Deployment", DEPLOYMENT))["spec"]["replicas"] == 3)

        await harness.until("the scaled Deployment", is_scaled)
        await until_settled(harness, recorder)
    for workload in await harness.workloads():
        image = pods_container(workload)["image"]
        assert image.startswith(MIRROR), f"{workload['metadata']['name']} was rolled to {image}"
        before = created[workload["metadata"]["name"]]
        assert before["metadata"]["uid"] == workload["metadata"]["uid"]
        assert before["spec"]["template"] == workload["spec"]["template"], "no Pod is replaced"
    assert (await harness.condition("Failed"))["status"] == "False"


EDITS: dict[str, Any] = {
    "image": lambda name: {"name": name, "image": "edited.example/image"},
    "removed variable": lambda name: {"name": name, "env": [{"name": "RLJOB_MODEL", "$patch": "delete"}]},
    "changed command": lambda name: {"name": name, "command": ["sleep"]},
}


@pytest.mark.parametrize("edit", EDITS)
async def test_edit_by_others_is_set_back_next_to_a_policy(harness, control_plane, edit):
    """As `kubectl edit` and `kubectl set image` do, whose requests the policy sees, too."""
    async with run_webhook(control_plane, harness, use_mirror):
        await harness.start(resync_seconds=0.4)
        await harness.create(smallest())
        await harness.until_all_workloads()
        before = (await harness.get("Deployment", DEPLOYMENT))["spec"]["template"]
        container = EDITS[edit](before["spec"]["containers"][0]["name"])
        body = {"spec": {"template": {"spec": {"containers": [container]}}}}
        path = harness.path("Deployment", DEPLOYMENT)
        edited = await harness.api.request("PATCH", path, body=body, content_type=STRATEGIC_MERGE_PATCH)
        assert edited["spec"]["template"] != before, "the edit changes something"

        async def is_set_back() -> bool:
            return bool((await harness.get("Deployment", DEPLOYMENT))["spec"]["template"] == before)

        await harness.until("the template as it was", is_set_back)


async def test_applies_of_a_job_repeat_what_a_policy_made_of_its_immutable_template(harness, control_plane):
    recorder = WriteRecorder()
    async with run_webhook(control_plane, harness, use_mirror_and_drop_a_variable, operations=("CREATE",)):
        await harness.start(recorder, resync_seconds=0.4)
        await harness.create(smallest())
        await harness.until_all_workloads()
        await harness.patch("Job", f"{NAME}-head", {"metadata": {"labels": {"rljob.dev/role": "edited"}}})

        async def is_set_back() -> bool:
            return bool((await harness.get("Job", f"{NAME}-head"))["metadata"]["labels"]["rljob.dev/role"] == "head")

        await harness.until("the label as it was", is_set_back)
        await until_settled(harness, recorder)
    assert (await harness.condition("Failed"))["status"] == "False"


async def test_changed_spec_is_applied_next_to_a_policy(harness, control_plane):
    async with run_webhook(control_plane, harness, use_mirror, operations=("CREATE",)):
        await harness.start(resync_seconds=0.4)
        await harness.create(smallest())
        await harness.until_all_workloads()
        template = {"spec": {"containers": [{"name": "rollout", "image": "other.example/image:2"}]}}
        await harness.patch("RLJob", NAME, put_all({"spec": {}}, {"rollout.template": template}))

        async def is_changed() -> bool:
            found = await harness.get("Deployment", DEPLOYMENT)
            return bool(pods_container(found)["image"] == "other.example/image:2")

        await harness.until("the changed image", is_changed)


def make_invalid(workload: Manifest) -> None:
    workload["spec"]["template"]["spec"]["dnsPolicy"] = "Unknown"


class RequestCounter:
    """A hook that counts the requests, dry runs included, that would write workloads."""

    def __init__(self) -> None:
        self.num = 0

    async def __call__(self, request: aiohttp.ClientRequest) -> None:
        self.num += request.method == "PATCH" and any(f"/{each}/" in request.url.path for each in PLURALS)


async def test_refused_workload_is_sent_again_ever_later_and_at_once_for_a_changed_spec(harness, control_plane):
    requests = RequestCounter()
    async with run_webhook(control_plane, harness, make_invalid):
        await harness.start(requests, resync_seconds=0.4)
        await harness.create(smallest())
        failed = await harness.until_condition("Failed")
        assert (failed["reason"], "dnsPolicy" in failed["message"]) == ("InvalidSpec", True)
        before = requests.num
        await harness.wait_for_resyncs(5)
        assert requests.num == before, "the next try is in 30 s"
        await harness.patch("RLJob", NAME, {"spec": {"rollout": {"replicas": 2}}})

        async def is_sent() -> bool:
            return requests.num > before

        await harness.until("a request for the changed spec", is_sent)


def take_over_as_kueue(workload: Manifest) -> None:
    """What Kueue's webhooks of Jobs and Deployments (job_webhook.go, deployment_webhook.go) do in a
    namespace with a LocalQueue `default` when RLJob is no external framework. That of StatefulSets leaves those whose
    Pods have the annotation of another parent."""
    metadata, template = workload["metadata"], workload["spec"]["template"]
    queue, parent = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/pod-suspending-parent"
    if workload["kind"] == "Job":
        metadata["labels"].setdefault(queue, "default")
        workload["spec"]["suspend"] = True
    elif workload["kind"] == "Deployment":
        metadata["labels"].setdefault(queue, "default")
        template["metadata"]["annotations"][parent] = "deployment"
        template["metadata"]["labels"] |= {"kueue.x-k8s.io/managed": "true", queue: metadata["labels"][queue]}


@pytest.mark.parametrize("gang", [{"gang": "none"}, {"gang": "kueue", "queue": "research"}])
async def test_head_that_kueue_suspends_is_in_the_status_and_costs_no_write(harness, control_plane, gang):
    recorder = WriteRecorder()
    async with run_webhook(control_plane, harness, take_over_as_kueue):
        await harness.start(recorder, resync_seconds=0.4)
        await harness.create(put_all(smallest(), {"scheduling": gang}))
        await harness.until_all_workloads()
        (event,) = await harness.until_event("SuspendedByKueue")
        assert "integrations.externalFrameworks" in event["message"]
        running = await harness.until_condition("Running", "False")
        assert (running["reason"], event["message"] in running["message"]) == ("SuspendedByKueue", True)
        await until_settled(harness, recorder)
