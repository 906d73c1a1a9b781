"""Workloads are created and changed only once the API server accepts each, in an order that protects Pods."""

import contextlib
import copy

import pytest

from rljob_api.errors import TransientError, UserError
from rljob_api.manifest.job import RLJob
from rljob_core.backend import (
    ChildKey,
    ForbiddenError,
    PodRejectedError,
    Reference,
)
from rljob_core.children import WORKLOAD_KINDS
from rljob_core.loop.failures import FailureTracker
from rljob_core.loop.reconcile import MISSING_RETRY_SECONDS, reconcile
from rljob_core.plan import conditions
from tests.support.memory_backend import (
    KEY,
    NUM_CHILDREN,
    OWNERS,
    START,
    MemoryBackend,
    edit,
    make_job,
    make_running,
    reward,
    workloads_of,
)


@pytest.fixture
def backend():
    return MemoryBackend(make_job())


@OWNERS
async def test_new_workloads_are_checked_once_and_before_the_first_is_created(owner, key):
    backend = MemoryBackend(owner)
    await reconcile(backend, key, START)
    assert sorted(child.name for child in backend.checks) == workloads_of(backend)
    await reconcile(backend, key, START)
    assert len(backend.checks) == len(workloads_of(backend)), "what exists is not checked again"


@pytest.mark.parametrize("error", [UserError("invalid"), PodRejectedError("PodSecurity"), TransientError("503")])
@pytest.mark.parametrize("role", ["head", "trainer", "rollout", "reward-correct"])
async def test_one_refused_workload_or_pod_means_that_no_workload_exists(backend, role, error):
    backend.pod_errors = {f"gsm8k-{role}": error}
    with contextlib.suppress(TransientError):
        await reconcile(backend, KEY, START)
    assert workloads_of(backend) == []
    assert len(backend.objects) == NUM_CHILDREN - 4, "what holds no node exists"
    backend.pod_errors = {}
    await reconcile(backend, KEY, START)
    assert len(backend.objects) == NUM_CHILDREN


SANDBOXES = {
    "data": {"train": {"source": "/data/train.jsonl"}, "format": "chat"},
    "agent": {"type": "loop", "tools": [{"name": "code", "sandbox": {"provider": "agentSandbox"}}]},
}


async def test_accounts_are_applied_first_and_pools_of_sandboxes_with_the_workloads():
    backend = MemoryBackend(make_job(**SANDBOXES))
    await reconcile(backend, KEY, START)
    kinds = [write.split()[1] for write in backend.writes if write.startswith("apply")]
    assert kinds[0] == "ServiceAccount", "dry runs of its Pods need it"
    first = min(kinds.index(kind) for kind in (*WORKLOAD_KINDS, "SandboxWarmPool"))
    assert not {*kinds[first:]} - {*WORKLOAD_KINDS, "SandboxWarmPool"}, "sandboxes start when all else is accepted"


async def test_a_refused_account_means_that_nothing_else_is_applied():
    backend = MemoryBackend(make_job(**SANDBOXES))
    backend.errors = {"ServiceAccount": ForbiddenError("set features.agentSandbox")}
    with pytest.raises(ForbiddenError):
        await reconcile(backend, KEY, START)
    assert list(backend.objects) == []
    assert "features.agentSandbox" in conditions.find(backend.owner.status, "Running").message


async def test_a_role_exists_before_its_binding():
    backend = MemoryBackend(make_job(**SANDBOXES))
    backend.errors = {"Role": TransientError("the API server is busy")}
    with pytest.raises(TransientError):
        await reconcile(backend, KEY, START)
    assert {key.kind for key in backend.objects} == {"ServiceAccount"}, "the API server refuses a binding without it"


async def test_a_cluster_without_sandboxes_fails_the_job_and_no_pod_starts():
    backend = MemoryBackend(make_job(**SANDBOXES))
    backend.errors = {"SandboxTemplate": UserError("this cluster has no SandboxTemplate")}
    await reconcile(backend, KEY, START)
    assert workloads_of(backend) == []
    assert "this cluster has no SandboxTemplate" in str(backend.owner.status.conditions)


async def test_what_runs_pods_is_deleted_before_what_protects_them():
    backend = MemoryBackend(make_job(**SANDBOXES))
    await reconcile(backend, KEY, START)
    edit(backend, agent={"type": "singleTurn", "tools": []})
    await reconcile(backend, KEY, START)
    deleted = [write.split()[1] for write in backend.writes if write.startswith("delete")]
    assert deleted[:3] == ["Deployment", "SandboxTemplate", "SandboxWarmPool"]
    assert {"NetworkPolicy", "ServiceAccount"} < set(deleted)
    assert not [key for key in backend.objects if key.name.startswith("gsm8k-agent-code")]


@OWNERS
async def test_rejected_pod_is_a_reason_to_wait_that_names_the_template(owner, key):
    backend = MemoryBackend(owner)
    is_job = key is KEY
    backend.pod_errors = {"gsm8k-trainer" if is_job else "math-rewardmodel": PodRejectedError("violates PodSecurity")}
    failures = FailureTracker()
    for _ in range(2):
        with pytest.raises(ForbiddenError):
            await reconcile(backend, key, START, failures=failures)
    waiting = conditions.find(backend.owner.status, "Running" if is_job else "Ready")
    assert (waiting.status, waiting.reason) == ("False", "FailedCreate")
    assert f"or {'spec.trainer' if is_job else 'spec'}.template" in waiting.message
    assert [event.reason for event in backend.events].count("FailedCreate") == 1
    backend.pod_errors = {}
    await reconcile(backend, key, START)
    assert conditions.find(backend.owner.status, conditions.RECONCILE_FAILED) is None


@OWNERS
async def test_nothing_is_dry_run_while_a_secret_is_missing(owner, key):
    backend = MemoryBackend(owner)
    is_job = key is KEY
    backend.missing = {"gsm8k-trainer" if is_job else "math-rewardmodel": (Reference("Secret", "key"),)}
    with pytest.raises(ForbiddenError, match="Secret key does not exist") as raised:
        await reconcile(backend, key, START)
    assert raised.value.reason == "ReferenceMissing"
    assert raised.value.retry_within_seconds == MISSING_RETRY_SECONDS
    assert (backend.checks, workloads_of(backend)) == ([], [])
    backend.missing = {}
    await reconcile(backend, key, START)
    assert workloads_of(backend)


async def test_scaling_needs_no_check_and_a_changed_template_does(backend):
    await reconcile(backend, KEY, START)
    backend.checks.clear()
    edit(backend, rollout={"replicas": 3})
    await reconcile(backend, KEY, START)
    assert backend.checks == []
    edit(backend, rollout={"env": {"A": "1"}})
    await reconcile(backend, KEY, START)
    assert ChildKey("Deployment", "gsm8k-rollout") in backend.checks


@pytest.mark.parametrize("error", [UserError("no dnsPolicy X"), PodRejectedError("no dnsPolicy X")])
async def test_refused_change_leaves_a_running_job_running_and_says_which_generation_stays(backend, error):
    await reconcile(backend, KEY, START)
    make_running(backend)
    await reconcile(backend, KEY, START)
    assert backend.owner.status.phase == "Running"
    before = copy.deepcopy(backend.objects)
    backend.pod_errors = {"gsm8k-head": error}
    edit(backend, head={"env": {"A": "1"}}, rollout={"replicas": 3, "env": {"B": "1"}})
    for _ in range(2):
        with contextlib.suppress(TransientError):
            await reconcile(backend, KEY, START)
    after = backend.objects
    assert {key: after[key] for key in after if key.kind in WORKLOAD_KINDS} == {
        key: before[key] for key in before if key.kind in WORKLOAD_KINDS
    }, "neither is the head deleted, nor is a part of the change applied"
    status = backend.owner.status
    running = conditions.find(status, "Running")
    assert (running.status, running.observed_generation) == ("True", 1)
    refused = next(
        c for c in status.conditions if c.type in ("Failed", conditions.RECONCILE_FAILED) and c.status == "True"
    )
    assert refused.message.startswith("generation 2 is not applied: ")
    assert refused.message.endswith("; generation 1 stays")
    backend.pod_errors = {}
    for _ in range(4):
        await reconcile(backend, KEY, START)
    assert after[ChildKey("Deployment", "gsm8k-rollout")]["spec"]["replicas"] == 3
    assert {c.observed_generation for c in backend.owner.status.conditions} == {2}


async def test_workload_is_scaled_although_a_change_of_another_is_refused(backend):
    await reconcile(backend, KEY, START)
    make_running(backend)
    await reconcile(backend, KEY, START)
    backend.pod_errors = {"gsm8k-reward-correct": UserError("no")}
    changed = reward("correct") | {"env": {"A": "1"}}
    manifest = backend.owner.model_dump(mode="json", by_alias=True)
    manifest["spec"]["rewards"] = [changed]
    manifest["spec"]["rollout"]["replicas"] = 4
    backend.owner = RLJob.model_validate(manifest)
    await reconcile(backend, KEY, START)
    assert backend.objects[ChildKey("Deployment", "gsm8k-rollout")]["spec"]["replicas"] == 4
