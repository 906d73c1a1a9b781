"""An upgrade of the operator on a real API server: it changes no workload, `restart` does, and no field is lost."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from rljob_cluster.control_plane.control_plane import ControlPlane
from rljob_core.children import common, head, pods
from rljob_core.children.difference import contains
from rljob_core.defaults import DEFAULTS
from rljob_core.kube.client import SSA, ApiError, connect
from rljob_operator.kube.crds import check_crds
from tests.integration.apiserver.manifests import put_all, smallest
from tests.integration.apiserver.operator_harness import NAME, Manifest, OperatorHarness, WriteRecorder
from tests.paths import ROOT
from tests.support import fast_yaml

NEWER = DEFAULTS.model_copy(update={"trainer_image": "rljob/trainer:next", "reward_image": "rljob/reward:next"})
MODEL = "shared"
ROLES = {
    ("Job", f"{NAME}-head"),
    ("StatefulSet", f"{NAME}-trainer"),
    ("Deployment", f"{NAME}-rollout"),
    ("Deployment", f"{NAME}-reward-correct"),
    ("Deployment", f"{MODEL}-rewardmodel"),
}
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
DATA = ROOT / "tests" / "data" / "configuration"
FORCED = {"fieldManager": "helm", "force": "true"}


async def read_workloads(harness: OperatorHarness) -> dict[tuple[str, str], Manifest]:
    return {(w["kind"], w["metadata"]["name"]): w for w in await harness.workloads()}


def identify(workloads: dict[tuple[str, str], Manifest]) -> dict[tuple[str, str], Any]:
    return {key: (w["metadata"]["uid"], w["spec"]) for key, w in workloads.items()}


async def read_images(harness: OperatorHarness) -> dict[str, str]:
    job, model = await harness.get("RLJob", NAME), await harness.get("RewardModel", MODEL)
    images = {role["name"]: role["image"] for role in ((job or {}).get("status") or {}).get("roles") or []}
    return images | {MODEL: ((model or {}).get("status") or {}).get("image", "")}


async def upgrade(harness: OperatorHarness, monkeypatch: pytest.MonkeyPatch) -> WriteRecorder:
    """Restart the operator with other images and code; return the writes of the new one."""
    await harness.stop()
    harness.tasks.clear()
    harness.apis.clear()
    monkeypatch.setattr(head, "_STARTUP_SECONDS", 605)
    build_labels = common.build_app_labels

    def build_more_labels(owner: Any, labels: Any, *, has_pods: bool) -> dict[str, str]:
        added = {"app.kubernetes.io/new": "yes"} if has_pods else {}
        return build_labels(owner, labels, has_pods=has_pods) | added

    monkeypatch.setattr(common, "build_app_labels", build_more_labels)
    monkeypatch.setattr(pods, "build_readiness", lambda port: {"tcpSocket": {"port": port}, "periodSeconds": 7})
    recorder = WriteRecorder()
    await harness.start(recorder, resync_seconds=0.4, defaults=NEWER)
    await harness.wait_for_resyncs()
    return recorder


@pytest.fixture
async def running(harness):
    await harness.start(resync_seconds=0.4)
    await harness.create(smallest("RewardModel", MODEL))
    await harness.create(smallest())

    async def exist() -> bool:
        images = set((await read_images(harness)).values())
        return set(await read_workloads(harness)) == ROLES and images == {DEFAULTS.trainer_image, DEFAULTS.reward_image}

    await harness.until("all workloads and their images", exist)
    return harness


async def test_upgrade_changes_no_workload_and_restart_rolls(running, monkeypatch):
    before, images = identify(await read_workloads(running)), await read_images(running)
    recorder = await upgrade(running, monkeypatch)
    assert identify(await read_workloads(running)) == before
    assert await read_images(running) == images
    assert recorder.writes == []
    await running.wait_for_resyncs()
    assert recorder.writes == [], "it settles"

    await running.patch("RLJob", NAME, {"metadata": {"annotations": {"rljob.dev/restart-rollout": "now"}}})
    await running.until("the new rollouts", lambda: runs_image(running, "rollout", NEWER.trainer_image))
    rolled = ("Deployment", f"{NAME}-rollout")
    after = identify(await read_workloads(running))
    assert after.pop(rolled) != before.pop(rolled)
    assert after == before, "only the requested role"

    await running.patch("RLJob", NAME, {"metadata": {"annotations": {"rljob.dev/restart": "now"}}})
    await running.until("the new head", lambda: runs_image(running, "head", NEWER.trainer_image))
    job_images = {name: image for name, image in (await read_images(running)).items() if name != MODEL}
    assert set(job_images.values()) == {NEWER.trainer_image, NEWER.reward_image}
    after = await read_workloads(running)
    head_spec = after["Job", f"{NAME}-head"]["spec"]["template"]["spec"]
    assert head_spec["containers"][0]["startupProbe"]["failureThreshold"] == 121
    assert (await read_images(running))[MODEL] == DEFAULTS.reward_image


async def runs_image(harness: OperatorHarness, role: str, image: str) -> bool:
    """Whether a role runs the image. Finishes foreground deletions, as a garbage collector does."""
    for workload in await harness.workloads():
        if "foregroundDeletion" in (workload["metadata"].get("finalizers") or []):
            await harness.patch(workload["kind"], workload["metadata"]["name"], {"metadata": {"finalizers": None}})
    return (await read_images(harness))[role] == image and set(await read_workloads(harness)) == ROLES


async def test_mutable_fields_of_kept_workloads_still_change(running, monkeypatch):
    before = await read_workloads(running)
    await upgrade(running, monkeypatch)
    await running.patch("RLJob", NAME, {"spec": {"rollout": {"replicas": 3}, "head": {"backoffLimit": 2}}})

    async def is_scaled() -> bool:
        found = await read_workloads(running)
        return bool(found["Deployment", f"{NAME}-rollout"]["spec"]["replicas"] == 3)

    await running.until("three rollouts", is_scaled)
    after = await read_workloads(running)
    assert {key: w["spec"]["template"] for key, w in after.items()} == {
        key: w["spec"]["template"] for key, w in before.items()
    }
    assert {w["metadata"]["uid"] for w in after.values()} == {w["metadata"]["uid"] for w in before.values()}


async def test_name_of_the_default_account_replaces_no_pod(running):
    before = identify(await read_workloads(running))
    for account in ("default", None):
        await running.patch("RLJob", NAME, {"spec": {"serviceAccountName": account}})
        generation = (await running.get("RLJob", NAME))["metadata"]["generation"]

        async def is_observed(wanted: int = generation) -> bool:
            return bool((await running.get("RLJob", NAME))["status"]["observedGeneration"] == wanted)

        await running.until("its status", is_observed)
        await running.wait_for_resyncs()
        assert identify(await read_workloads(running)) == before


def read_crds() -> list[Manifest]:
    return [fast_yaml.load(path.read_text()) for path in sorted((ROOT / "crds").glob("*.yaml"))]


def earlier(crd: Manifest) -> Manifest:
    """The CRD without some fields, a rule and its version, as an earlier version had it."""
    del crd["metadata"]["annotations"]
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    for name in ("priorityClassName", "hub"):
        spec.pop(name, None)
    if "rollout" in spec:
        del spec["rollout"]["properties"]["sampling"]["x-kubernetes-validations"]
    return crd


@pytest.fixture
async def old_cluster(tmp_path, loopback):
    """A cluster with the CRDs of an earlier version."""
    with ControlPlane(tmp_path, address=f"{loopback}.9", components=("etcd", "kube-apiserver")) as running:
        kubeconfig = str(running.kubeconfig)
        api = await connect(kubeconfig)
        harness = OperatorHarness(api, "default", kubeconfig)
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
        await api.request("POST", "/api/v1/namespaces/default/serviceaccounts", body=account)
        priority = {"metadata": {"name": "high"}, "value": 1}  # of the stored trainer
        await api.request("POST", "/apis/scheduling.k8s.io/v1/priorityclasses", body=priority)
        for crd in read_crds():
            await api.request("POST", CRDS, body=earlier(crd))
        yield harness
        await harness.stop()
        await api.close()


async def create_when_served(harness: OperatorHarness, manifest: Manifest) -> None:
    async def is_created() -> bool:
        try:
            await harness.create(manifest)
        except ApiError as error:
            if error.code != 404:
                raise
            return False
        return True

    await harness.until("the CRD is served", is_created)


STARTED = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
OLD_STATUS = {
    "RLJob": {
        "conditions": [{"type": "Running", "status": "True", "reason": "Running", "lastTransitionTime": STARTED}],
        "observedGeneration": 1,
        "phase": "Running",
        "roles": [{"name": "head", "desired": 1, "ready": 1, "restarts": 2}],
        "rollouts": "6/6",
        "progress": {"step": 3, "totalSteps": 500, "reward": 0.25, "weightVersion": 3, "phase": "generate"},
        "retried": "once",
        "startTime": STARTED,
    },
    "RewardModel": {
        "conditions": [{"type": "Ready", "status": "True", "reason": "Serving", "lastTransitionTime": STARTED}],
        "observedGeneration": 1,
        "replicas": 2,
        "readyReplicas": 2,
        "endpoints": ["shared-rewardmodel.default.svc:8080"],
    },
}


async def test_crds_of_an_earlier_version_upgrade_with_stored_objects(old_cluster):
    """Nothing is pruned, and the operator reconciles the objects without writing their spec. With the fields that the
    new CRDs add, their workloads have the digests by which earlier ones are kept."""
    stored = list(fast_yaml.load_all((DATA / "stored.yaml").read_text()))
    before = {}
    for manifest in stored:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        await create_when_served(old_cluster, manifest | {"metadata": {"name": name}})
        await old_cluster.patch_status(kind, name, OLD_STATUS[kind])
        before[kind, name] = await old_cluster.get(kind, name)
        assert contains(before[kind, name], {"spec": manifest["spec"], "status": OLD_STATUS[kind]}), "as it was stored"
    nucleus = put_all(smallest(name="nucleus"), {"rollout.sampling.topP": 0.9, "managedBy": "example.com/other"})
    await old_cluster.create(nucleus)
    assert await check_crds(old_cluster.api), "this operator would not start"

    for crd in read_crds():
        await old_cluster.api.request(
            "PATCH", f"{CRDS}/{crd['metadata']['name']}", query=FORCED, body=crd, content_type=SSA
        )
    await old_cluster.until("the new CRDs", lambda: is_current(old_cluster))
    for (kind, name), old in before.items():
        new = await old_cluster.get(kind, name)
        assert contains(new, {part: old[part] for part in ("spec", "status")}), "nothing is pruned"
    await old_cluster.patch("RLJob", "nucleus", {"spec": {"schedule": {"steps": 7}}})  # a later rule forbids its topP
    await old_cluster.patch_status("RLJob", "nucleus", OLD_STATUS["RLJob"])
    with pytest.raises(ApiError, match=r"topP must be 1 for training.*remove it"):
        await old_cluster.patch("RLJob", "nucleus", {"spec": {"rollout": {"sampling": {"maxTokens": 7}}}})

    for (kind, name), old in before.items():
        suffix, label = {"RLJob": ("token", "job"), "RewardModel": ("rewardmodel", "reward-model")}[kind]
        await old_cluster.create(build_secret(old, f"{name}-{suffix}", f"rljob.dev/{label}"))
    for kind, name in (("Secret", "wandb"), ("ConfigMap", "f")):  # which the stored job refers to
        await old_cluster.create({"apiVersion": "v1", "kind": kind, "metadata": {"name": name}})
    for name in ("models", "datasets", "checkpoints"):
        await old_cluster.create_claim(name)
    recorder = WriteRecorder()
    await old_cluster.start(recorder, resync_seconds=0.4, namespaces=("default",))
    for kind, name in before:
        await old_cluster.until(f"a status of {kind} {name}", lambda k=kind, n=name: has_image(old_cluster, k, n))
    await old_cluster.wait_for_resyncs()
    for (kind, name), old in before.items():
        new = await old_cluster.get(kind, name)
        assert new["metadata"]["generation"] == old["metadata"]["generation"] == 1
        assert contains(new["spec"], old["spec"])
    await old_cluster.until("all workloads", lambda: has_workloads(old_cluster, 7))
    hashes = {name: config_hash_of(w) for (_, name), w in (await read_workloads(old_cluster)).items()}
    assert hashes == fast_yaml.load((DATA / "config-hashes.yaml").read_text())
    owners = tuple(f"/{plural}/{name}" for plural, name in (("rljobs", "stored"), ("rewardmodels", "shared")))
    assert not [write for write in recorder.writes if write.endswith(owners)], "only their status is written"


def build_secret(owner: Manifest, name: str, label: str) -> Manifest:
    """The Secret of an earlier operator, with the token of the digests."""
    reference = {name: owner[name] for name in ("apiVersion", "kind")} | {"controller": True}
    reference |= {name: owner["metadata"][name] for name in ("name", "uid")}
    labels = {label: owner["metadata"]["name"], "app.kubernetes.io/managed-by": "rljob-operator"}
    metadata = {"name": name, "labels": labels, "ownerReferences": [reference]}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"token": "token"}}


async def has_workloads(harness: OperatorHarness, number: int) -> bool:
    return len(await harness.workloads()) == number


def config_hash_of(workload: Manifest) -> str:
    return str(workload["spec"]["template"]["metadata"]["annotations"]["rljob.dev/config-hash"])


async def is_current(harness: OperatorHarness) -> bool:
    return not await check_crds(harness.api)


async def has_image(harness: OperatorHarness, kind: str, name: str) -> bool:
    status = ((await harness.get(kind, name)) or {}).get("status") or {}
    images = [status.get("image")] if kind == "RewardModel" else [role.get("image") for role in status["roles"]]
    return all(images)


async def test_job_keeps_the_defaults_with_which_it_has_started(running, monkeypatch):
    """Here 10 is another version's default in place of its 7: nothing changes for a running job, nor for a resumed
    one."""
    started = (await running.get("RLJob", NAME))["status"]["defaults"]
    assert (started["checkpoint"]["everySteps"], started["rewards"]["weight"]) == (10, 1.0)
    await running.stop()
    before = identify(await read_workloads(running))
    await running.patch_status("RLJob", NAME, {"defaults": {"checkpoint": {"everySteps": 7}, "rewards": {"slots": 3}}})
    recorder = await upgrade(running, monkeypatch)
    assert not [write for write in recorder.writes if write.startswith("DELETE")]
    assert await has_settings(running)
    assert identify(await read_workloads(running)) == before
    for suspend in (True, False):
        await running.patch("RLJob", NAME, {"spec": {"suspend": suspend}})
        await running.until("the job's Pods" if not suspend else "no Pods", lambda s=suspend: is_suspended(running, s))
    assert await has_settings(running)


async def has_settings(harness: OperatorHarness) -> bool:
    text = (await harness.get("ConfigMap", f"{NAME}-config"))["data"]["job.yaml"]
    spec = fast_yaml.load(text)["spec"]
    return spec["checkpoint"] == {"everySteps": 7} and spec["rewards"][0]["slots"] == 3


async def is_suspended(harness: OperatorHarness, suspend: bool) -> bool:
    for workload in await harness.workloads():
        if "foregroundDeletion" in (workload["metadata"].get("finalizers") or []):
            await harness.patch(workload["kind"], workload["metadata"]["name"], {"metadata": {"finalizers": None}})
    return (("Job", f"{NAME}-head") in await read_workloads(harness)) is not suspend
