"""A job that only evaluates, with the whole operator on a real API server. The test does what the controllers and the
kubelet do."""

from __future__ import annotations

import json

import pytest

from rljob_api.wire.termination import RESULT_PREFIX
from rljob_core.kube.client import ApiError
from tests.integration.apiserver.manifests import put_all, smallest
from tests.integration.apiserver.operator_harness import NAME, OperatorHarness, start_pod

EVALUATE = {"task": "evaluate", "data.eval": {"source": "hf://org/data"}}
WORKLOADS = (("Job", "head"), ("Deployment", "rollout"), ("Deployment", "reward-correct"))
CHILDREN = {
    "ConfigMap": {"config", "reward-correct"},
    "Deployment": {"rollout", "reward-correct"},
    "Job": {"head"},
    "NetworkPolicy": {"head", "rollout", "reward-correct"},
    "PodDisruptionBudget": {"head"},
    "Secret": {"token"},
    "Service": {"head", "rollout", "reward-correct"},
    "StatefulSet": set[str](),
}
RESULTS = [{"set": "eval", "name": "accuracy", "value": 0.5, "low": 0.25, "high": 0.75, "num_prompts": 16}]


async def start_job(harness: OperatorHarness) -> None:
    await harness.start()
    await harness.create(put_all(smallest(), EVALUATE))
    await harness.until_all_workloads(len(WORKLOADS))


async def end_head(harness: OperatorHarness, pod: str) -> None:
    """Let the head succeed, as its kubelet and the Job's controller report it."""
    now, message = "2026-01-01T00:00:00Z", f"{RESULT_PREFIX}{json.dumps(RESULTS)}"
    end = {"exitCode": 0, "reason": "Completed", "startedAt": now, "finishedAt": now, "message": message}
    ended = {"name": "head", "image": "i", "imageID": "", "ready": False, "restartCount": 0}
    status = {"phase": "Succeeded", "containerStatuses": [ended | {"state": {"terminated": end}}]}
    await harness.patch_status("Pod", pod, status)
    conditions = [
        {"type": type_, "status": "True", "lastTransitionTime": now, "lastProbeTime": now}
        for type_ in ("SuccessCriteriaMet", "Complete")
    ]
    times = {"startTime": now, "completionTime": now, "succeeded": 1}
    await harness.patch_status("Job", f"{NAME}-head", {"conditions": conditions, **times})


async def test_job_runs_without_a_trainer_and_ends_with_its_results_in_the_status(harness):
    await start_job(harness)
    found: dict[str, set[str]] = {kind: set() for kind in CHILDREN}
    for child in await harness.list(*CHILDREN):
        found[child["kind"]].add(child["metadata"]["name"].removeprefix(f"{NAME}-"))
    assert found == CHILDREN
    pods = {role: await start_pod(harness, kind, role) for kind, role in WORKLOADS}
    await harness.until_condition("Running")
    job = await harness.get("RLJob", NAME)
    assert job is not None
    assert [role["name"] for role in job["status"]["roles"]] == ["head", "rollout", "reward-correct"]

    await end_head(harness, pods["head"])
    succeeded = await harness.until_condition("Succeeded")
    assert succeeded["message"].startswith("the model is evaluated: eval: accuracy 0.500")
    job = await harness.get("RLJob", NAME)
    assert job is not None
    stored = {"set": "eval", "name": "accuracy", "value": 0.5, "low": 0.25, "high": 0.75, "numPrompts": 16}
    assert job["status"]["evaluation"] == [stored]


async def test_api_server_refuses_what_a_job_that_evaluates_cannot_have(harness):
    await harness.start()
    with pytest.raises(ApiError, match=r"data.eval or evaluation.sets must be set with task evaluate"):
        await harness.create(put_all(smallest(), {"task": "evaluate"}))
    with pytest.raises(ApiError, match=r"rollout.placement must be separate with task evaluate"):
        await harness.create(put_all(smallest(), EVALUATE | {"rollout.placement": "trainer"}))
    await harness.create(put_all(smallest(), EVALUATE))
    with pytest.raises(ApiError, match=r"task is immutable; create a new RLJob instead"):
        await harness.patch("RLJob", NAME, {"spec": {"task": "train"}})
