"""The operator's own I/O on a real API server: run_operator in this process, with hands on its requests.

Nothing plays controllers but the test itself. The tests wait for a condition of the cluster with a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from manifests import put_all, smallest
from operator_world import DEADLINE_SECONDS, NAME, Lists, Manifest, World, Writes

from rljob_api.errors import TransientError
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.status import RLJobStatus
from rljob_operator.backend import ChildKey, Event
from rljob_operator.kube.backend import KubernetesBackend
from rljob_operator.kube.cache import Cache
from rljob_operator.kube.client import MERGE_PATCH, ApiError, connect
from rljob_operator.kube.driver import DriverClient
from rljob_operator.kube.operator import LeaseLost
from rljob_operator.kube.resources import POD, RLJOB

CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


@pytest.fixture
async def world(control_plane, namespace) -> AsyncIterator[World]:
    api = await connect(str(control_plane.kubeconfig))
    made = World(api, namespace, str(control_plane.kubeconfig))
    try:
        yield made
    finally:
        await made.stop()
        # A cluster-wide operator of a later test must not see this one's job.
        with contextlib.suppress(ApiError):
            await made.delete("RLJob", NAME)
        await api.close()


@pytest.mark.parametrize("everywhere", [False, True])
async def test_a_deleted_child_comes_back_and_an_edited_one_is_put_back(world, everywhere):
    await world.start(**({"namespaces": ()} if everywhere else {}))
    await world.create(smallest())
    await world.all_children()
    for kind, name in (("Service", f"{NAME}-rollout"), ("Deployment", f"{NAME}-rollout")):
        uid = (await world.get(kind, name))["metadata"]["uid"]
        await world.delete(kind, name)
        await world.back(kind, name, uid)
    await world.patch("StatefulSet", f"{NAME}-trainer", {"spec": {"replicas": 7}})

    async def put_back() -> bool:
        return (await world.get("StatefulSet", f"{NAME}-trainer"))["spec"]["replicas"] == 1

    await world.until("the StatefulSet as planned", put_back)


@pytest.mark.parametrize("label", ["rljob.dev/job", "app.kubernetes.io/managed-by"])
@pytest.mark.parametrize("value", ["another", None])
async def test_a_child_whose_label_was_edited_gets_it_back_though_no_look_is_due(world, label, value):
    lists = Lists()
    await world.start(lists, resync_seconds=3600.0)
    await world.create(put_all(smallest(), {"suspend": True}))  # nobody polls its driver
    name = f"{NAME}-rollout"

    async def rests() -> Manifest | None:
        is_suspended = (await world.condition("Suspended")).get("status") == "True"
        # The operator's, kopf's, and the one after kopf's: the last before the next hour's.
        return await world.get("Service", name) if is_suspended and lists.num >= 3 else None

    before = await world.until("the Service", rests)
    await world.patch("Service", name, {"metadata": {"labels": {label: value}}})

    async def put_back() -> bool:
        labels = (await world.get("Service", name))["metadata"]["labels"]
        return bool(labels.get(label) == before["metadata"]["labels"][label])

    await world.until("the label as planned", put_back)
    assert (await world.get("Service", name))["metadata"]["uid"] == before["metadata"]["uid"], "it is not made anew"


async def test_a_name_that_someone_else_has_is_a_condition_and_is_never_changed(world):
    job = smallest()
    taken = f"{NAME}-config"
    foreign = await world.create(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": taken}, "data": {"a": "b"}}
    )
    writes = Writes()
    await world.start(writes)
    await world.create(job)

    async def conflict() -> bool:
        return (await world.condition("NameConflict")).get("status") == "True"

    await world.until("the condition", conflict)
    assert taken in (await world.condition("NameConflict"))["message"]
    assert (await world.get("ConfigMap", taken))["metadata"]["resourceVersion"] == foreign["metadata"][
        "resourceVersion"
    ]
    assert await world.workloads() == [], "no Pod may read someone else's configuration"

    async def told() -> list[Manifest]:
        return await world.events("ForeignObject")

    assert len(await world.until("the event", told)) == 1
    await world.delete("ConfigMap", taken)
    await world.patch("RLJob", NAME, {"metadata": {"labels": {"look": "again"}}})
    await world.all_children()

    async def mended() -> bool:
        return (await world.condition("NameConflict")).get("status") == "False"

    await world.until("the condition's end", mended)


async def test_a_second_look_at_a_settled_job_writes_nothing(world):
    writes = Writes()
    await world.start(writes, resync_seconds=1.0)
    await world.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{NAME}-config"}})
    await world.create(smallest())

    async def conflict() -> bool:
        return bool(await world.events("ForeignObject"))

    await world.until("the conflict", conflict)
    lists = Lists()
    world.apis[0].hooks.append(lists)
    before = list(writes.made)

    async def looked_twice() -> bool:
        return lists.num >= 3

    await world.until("three resyncs, each with a look at every job", looked_twice)
    assert writes.made == before


@pytest.mark.parametrize("label", ["app.kubernetes.io/managed-by", "rljob.dev/job"])
async def test_a_secret_whose_labels_someone_took_is_found_again_with_its_token(world, label):
    writes = Writes()
    await world.start(writes, resync_seconds=1.0)
    await world.create(smallest())
    await world.all_children()
    before = await world.get("Secret", f"{NAME}-token")
    uids = {w["metadata"]["uid"] for w in await world.workloads()}
    await world.patch("Secret", f"{NAME}-token", {"metadata": {"labels": {label: "another"}}})

    async def labelled() -> bool:
        return (await world.get("Secret", f"{NAME}-token"))["metadata"]["labels"] == before["metadata"]["labels"]

    await world.until("its labels", labelled)
    lists = Lists()
    world.apis[0].hooks.append(lists)

    async def looked_twice() -> bool:
        return lists.num >= 3

    await world.until("three resyncs, each with a look at the job", looked_twice)
    after = await world.get("Secret", f"{NAME}-token")
    assert after["data"] == before["data"], "running Pods know no other token"
    assert {w["metadata"]["uid"] for w in await world.workloads()} == uids, "nothing restarts for a label"
    assert (await world.condition("Failed"))["status"] == "False"


async def test_an_event_that_is_repeated_raises_its_count(world):
    job = RLJob.model_validate(await world.create(smallest()))
    driver = DriverClient()
    backend = KubernetesBackend(world.api, Cache(), driver, keys=lambda: pytest.fail("no watch here"))
    for _ in range(3):
        await backend.record_event(job, Event("Warning", "Why", "because"))
    (event,) = await world.events("Why")
    assert (event["count"], event["involvedObject"]["name"]) == (3, NAME)


@pytest.mark.parametrize("is_made_anew", [False, True])
async def test_a_status_is_of_the_object_that_was_looked_at_and_of_no_other(world, is_made_anew):
    """Neither of one whose spec has changed meanwhile, nor of another one of the same name."""
    seen = RLJob.model_validate(await world.create(smallest()))
    if is_made_anew:
        await world.delete("RLJob", NAME)
        await world.create(smallest())
    else:
        await world.patch("RLJob", NAME, {"spec": {"suspend": True}})
    backend = KubernetesBackend(world.api, Cache(), DriverClient(), keys=lambda: pytest.fail("no watch here"))
    with pytest.raises(TransientError, match="409"):
        await backend.update_status(seen, RLJobStatus(observed_generation=7))
    assert "status" not in await world.get("RLJob", NAME)
    now = RLJob.model_validate(await world.get("RLJob", NAME))
    await backend.update_status(now, RLJobStatus(observed_generation=now.metadata.generation))
    assert (await world.get("RLJob", NAME))["status"]["observedGeneration"] == now.metadata.generation


async def test_suspend_deletes_the_workloads_and_resume_makes_them_anew(world):
    await world.start()
    await world.create(smallest())
    await world.all_children()
    await world.patch("RLJob", NAME, {"spec": {"suspend": True}})

    async def leaving() -> bool:
        # No garbage collector runs here: foreground deletion waits for it, as its finalizer says.
        found = await world.workloads()
        return all("foregroundDeletion" in (w["metadata"].get("finalizers") or []) for w in found)

    await world.until("the workloads under foreground deletion", leaving)
    old = {w["metadata"]["uid"] for w in await world.workloads()}
    for workload in await world.workloads():
        await world.patch(workload_kind(workload), workload["metadata"]["name"], {"metadata": {"finalizers": None}})

    async def gone() -> bool:
        return not await world.workloads()

    await world.until("the workloads' end", gone)
    await world.patch("RLJob", NAME, {"spec": {"suspend": False}})
    await world.all_children()
    assert old.isdisjoint(w["metadata"]["uid"] for w in await world.workloads())


def workload_kind(workload: Manifest) -> str:
    name = workload["metadata"]["name"]
    return {"head": "Job", "trainer": "StatefulSet"}.get(name.removeprefix(f"{NAME}-"), "Deployment")


async def test_a_finished_job_goes_when_its_time_is_over(world):
    await world.start()
    await world.create(put_all(smallest(), {"ttlSecondsAfterFinished": 1}))
    await world.all_children()
    said = "2026-01-01T00:00:00Z"
    conditions = [{"type": type_, "status": "True"} for type_ in ("SuccessCriteriaMet", "Complete")]
    status = {"conditions": conditions, "startTime": said, "completionTime": said, "succeeded": 1}
    path = world.path("Job", f"{NAME}-head") + "/status"
    status["uncountedTerminatedPods"] = {}
    await world.api.request("PATCH", path, body={"status": status}, content_type=MERGE_PATCH)

    async def gone() -> bool:
        return await world.get("RLJob", NAME) is None

    await world.until("the job's end", gone)


async def test_the_gate_of_a_pod_is_removed_and_others_gates_stay(world):
    gates = [{"name": "rljob.dev/gang"}, {"name": "other.dev/gate"}]
    spec = {"containers": [{"name": "a", "image": "a"}], "schedulingGates": gates}
    from rljob_api.wire.contract import SCHEDULING_GATE

    gates[0]["name"] = SCHEDULING_GATE
    account = {"metadata": {"name": "default"}}
    await world.api.request("POST", f"/api/v1/namespaces/{world.namespace}/serviceaccounts", body=account)
    pod = await world.create({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec})
    cache = Cache()
    backend = KubernetesBackend(world.api, cache, DriverClient(), keys=lambda: pytest.fail("no watch here"))
    cache.upsert(POD.key, pod)
    await backend.ungate(world.namespace, "p")
    assert (await world.get("Pod", "p"))["spec"]["schedulingGates"] == gates[1:]


async def test_a_reward_model_gets_its_children_and_status(world):
    await world.start()
    await world.create(smallest("RewardModel", "rm"))

    async def said() -> Manifest:
        return await world.condition("Ready", "RewardModel", "rm")

    assert (await world.until("its condition", said))["reason"] == "WaitingForPods"
    assert await world.get("Deployment", "rm-rewardmodel")
    uid = (await world.get("Service", "rm-rewardmodel"))["metadata"]["uid"]
    await world.delete("Service", "rm-rewardmodel")
    await world.back("Service", "rm-rewardmodel", uid)
    await world.delete("RewardModel", "rm")


async def test_a_reward_model_that_cannot_be_read_gets_a_condition_and_no_traceback(world, caplog, monkeypatch):
    from rljob_api.manifest.reward import RewardModel

    real = RewardModel.model_validate

    def refuse(manifest: Any, **options: Any) -> RewardModel:
        return real(manifest | {"spec": manifest["spec"] | {"unheardOf": 1}}, **options)

    monkeypatch.setattr(RewardModel, "model_validate", refuse)  # the CRD of another version knows more
    await world.start()
    await world.create(smallest("RewardModel", "rm"))

    async def said() -> Manifest:
        return await world.condition("Ready", "RewardModel", "rm")

    condition = await world.until("its condition", said)
    assert (condition["status"], condition["reason"]) == ("False", "InvalidSpec")
    assert "unheardOf" in condition["message"]
    assert "Traceback" not in caplog.text
    await world.delete("RewardModel", "rm")


async def test_a_gang_of_a_scheduler_that_is_not_there_is_said_in_the_jobs_condition(world):
    await world.start()
    await world.create(put_all(smallest(), {"scheduling.gang": "volcano"}))

    async def refused() -> bool:
        return "no PodGroup" in (await world.condition("Failed")).get("message", "")

    await world.until("the refusal", refused)


async def test_a_second_operator_takes_over_from_a_dead_one_and_at_once_from_one_that_ends(world):
    lease = {"lease": True, "lease_namespace": world.namespace, "lease_seconds": 3}
    cut = Cut()
    first = await world.start(cut, **lease)
    await world.create(smallest())
    await world.all_children()
    second = await world.start(**lease)
    path = f"/apis/coordination.k8s.io/v1/namespaces/{world.namespace}/leases/rljob-operator"
    holder = (await world.api.request("GET", path))["spec"]["holderIdentity"]
    cut.is_cut = True

    async def changed() -> str:
        now = (await world.api.request("GET", path))["spec"]["holderIdentity"]
        return now if now not in ("", holder) else ""

    taken: asyncio.Task[Any] = asyncio.create_task(world.until("another holder", changed))
    with pytest.raises(LeaseLost):
        await asyncio.wait_for(first, DEADLINE_SECONDS)
    world.tasks.remove(first)
    holder = await taken
    uid = (await world.get("Deployment", f"{NAME}-rollout"))["metadata"]["uid"]
    await world.delete("Deployment", f"{NAME}-rollout")
    await world.back("Deployment", f"{NAME}-rollout", uid)
    await world.start(**lease | {"lease_seconds": 3})
    second.cancel()  # what SIGTERM does
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.wait_for(second, DEADLINE_SECONDS)
    assert (await world.api.request("GET", path))["spec"]["holderIdentity"] != holder, "it was given back"
    await world.until("the third", changed)


async def test_a_process_that_is_told_to_end_gives_the_lease_back(world):
    options = [f"--kubeconfig={world.kubeconfig}", f"--namespace={world.namespace}"]
    options += [f"--lease-namespace={world.namespace}", "--metrics-port=0", "--health-port=0"]
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "rljob_operator", *options)
    try:
        await world.create(smallest())
        await world.all_children()
        process.terminate()
        assert await asyncio.wait_for(process.wait(), DEADLINE_SECONDS) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    path = f"/apis/coordination.k8s.io/v1/namespaces/{world.namespace}/leases/rljob-operator"
    assert not (await world.api.request("GET", path))["spec"].get("holderIdentity")


class Cut:
    """A hook that cuts an operator off from the API server."""

    is_cut = False

    async def __call__(self, request: aiohttp.ClientRequest) -> None:
        if self.is_cut:
            raise aiohttp.ClientConnectionError("cut off")


async def test_a_delete_that_no_watch_told_of_is_found_by_the_resync(world):
    class NoWatch(Cut):
        async def __call__(self, request: aiohttp.ClientRequest) -> None:
            if self.is_cut and "watch" in request.url.query and request.url.path.endswith("/services"):
                await asyncio.sleep(3600)  # a watch that hangs for good

    hook = NoWatch()
    hook.is_cut = True
    await world.start(hook, resync_seconds=2.0)
    await world.create(smallest())
    await world.all_children()
    uid = (await world.get("Service", f"{NAME}-rollout"))["metadata"]["uid"]
    await world.delete("Service", f"{NAME}-rollout")
    await world.back("Service", f"{NAME}-rollout", uid)


async def test_a_delete_between_our_list_and_the_watches_own_is_found_at_once(world):
    deleted = asyncio.Event()

    async def delete_before_the_watch_lists(request: aiohttp.ClientRequest) -> None:
        # Ours asks for chunks of its labels too, so they are told apart by their number: the first is ours.
        if request.url.path.endswith("/services") and request.method == "GET":
            seen.append(request.url)
            if len(seen) == 2:
                await world.delete("Service", f"{NAME}-rollout")
                deleted.set()

    seen: list[Any] = []
    first = await world.start()
    await world.create(smallest())
    await world.all_children()
    uid = (await world.get("Service", f"{NAME}-rollout"))["metadata"]["uid"]
    first.cancel()
    await asyncio.wait([first])
    await world.start(delete_before_the_watch_lists)
    await asyncio.wait_for(deleted.wait(), DEADLINE_SECONDS)
    await world.back("Service", f"{NAME}-rollout", uid)


async def test_what_rbac_lacks_is_told_in_an_event_and_mended_when_it_is_granted(world, control_plane):
    rules = [
        {"apiGroups": ["*"], "resources": ["*"], "verbs": ["get", "list", "watch"]},
        {"apiGroups": ["rljob.dev"], "resources": ["*"], "verbs": ["*"]},
        {"apiGroups": [""], "resources": ["*"], "verbs": ["*"]},
    ]
    base = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{world.namespace}"
    role: Manifest = {"metadata": {"name": "r"}, "rules": rules}
    await world.api.request("POST", f"{base}/roles", body=role)
    ref = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "r"}
    subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "weak"}
    await world.api.request(
        "POST", f"{base}/rolebindings", body={"metadata": {"name": "r"}, "roleRef": ref, "subjects": [subject]}
    )
    await world.start(kubeconfig=str(control_plane.kubeconfig_for("weak")), resync_seconds=2.0)
    await world.create(smallest())

    async def told() -> list[Manifest]:
        return await world.events("Forbidden")

    event = (await world.until("the event", told))[0]
    assert "patch networkpolicies" in event["message"] or "patch poddisruptionbudgets" in event["message"]
    rules.append({"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]})
    await world.api.request("PATCH", f"{base}/roles/r", body={"rules": rules}, content_type=MERGE_PATCH)
    await world.all_children()


async def test_a_leader_is_ready_after_its_first_list(world, unused_tcp_port_factory):
    port = unused_tcp_port_factory()
    gate = asyncio.Event()

    async def hold(request: aiohttp.ClientRequest) -> None:
        if request.url.path.endswith("/deployments"):
            await gate.wait()

    async def ready() -> int:
        with contextlib.suppress(aiohttp.ClientError):
            async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/readyz") as answer:
                return answer.status
        return 0

    await world.start(hold, health_port=port)
    assert await world.until("an answer", ready) == 503
    gate.set()

    async def is_ready() -> bool:
        return await ready() == 200

    await world.until("ready", is_ready)


def test_the_paths_of_the_kinds_are_those_of_the_api_server():
    assert RLJOB.path("ns", "a") == "/apis/rljob.dev/v1alpha1/namespaces/ns/rljobs/a"
    assert ChildKey("PodGroup", "a") != ChildKey("Job", "a")
