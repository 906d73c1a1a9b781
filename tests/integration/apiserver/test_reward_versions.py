"""Two versions of a reward on a real API server: conditions from the first new Pod to the last old one, and no write
beyond them. The test simulates the Deployments' controller and the kubelets."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.apiserver.manifests import INLINE, put_all, smallest
from tests.integration.apiserver.operator_harness import NAME, Manifest, OperatorHarness, WriteRecorder

MODEL = "math"
NEW = INLINE.replace("1.0", "0.5")
OWNERS = {"RLJob": (NAME, f"{NAME}-reward-correct"), "RewardModel": (MODEL, f"{MODEL}-rewardmodel")}
"""By kind: its name, and its Deployment's."""
CONDITIONS = {"RLJob": "RewardVersionsMixed", "RewardModel": "Updating"}


async def get_deployment(harness: OperatorHarness, kind: str, source: str, old: Manifest | None = None) -> Manifest:
    """Wait for the Deployment of a source; with `old`, until its template has changed too."""
    name = OWNERS[kind][1]

    async def find() -> Manifest | None:
        found, config = await harness.get("Deployment", name), await harness.get("ConfigMap", name)
        is_current = found and config and source.splitlines()[1] in str(config["data"])
        is_changed = found and (old is None or found["spec"]["template"] != old["spec"]["template"])
        return found if is_current and is_changed else None

    found: Manifest = await harness.until(f"the Deployment of {kind}", find)
    return found


async def start_pod(harness: OperatorHarness, deployment: Manifest, name: str) -> None:
    """Create a ready Pod of the Deployment."""
    template = deployment["spec"]["template"]
    metadata = {key: template["metadata"][key] for key in ("labels", "annotations")}
    container = template["spec"]["containers"][0]
    spec = {"containers": [{key: container[key] for key in ("name", "image", "env")}]}
    await harness.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata | {"name": name}, "spec": spec})
    status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    await harness.patch_status("Pod", name, status)


async def until_reported(harness: OperatorHarness, kind: str, status: str, text: str = "") -> Manifest:
    async def is_reported() -> Manifest | None:
        found = await harness.condition(CONDITIONS[kind], kind, OWNERS[kind][0])
        return found if found.get("status") == status and text in found["message"] else None

    found: Manifest = await harness.until(f"{CONDITIONS[kind]} {status} of {kind} with {text!r}", is_reported)
    return found


@pytest.mark.parametrize("kind", ["RLJob", "RewardModel"])
async def test_mixed_versions_condition_emits_one_event_at_start_and_end(harness, kind):
    recorder = WriteRecorder()
    await harness.start(recorder, resync_seconds=0.4)
    path = "rewards.0.function.inline" if kind == "RLJob" else "function.inline"
    name, _ = OWNERS[kind]
    stored = await harness.create(put_all(smallest(kind, name), {path.replace("function.inline", "replicas"): 2}))
    old = await get_deployment(harness, kind, INLINE)
    strategy = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "25%", "maxUnavailable": 0}}
    assert old["spec"]["strategy"] == strategy
    for pod in ("old-a", "old-b"):
        await start_pod(harness, old, pod)
    changed: Any = put_all(stored, {path: NEW})
    await harness.patch(kind, name, {"spec": changed["spec"]})
    new = await get_deployment(harness, kind, NEW, old)
    await start_pod(harness, new, "new-a")
    message = (await until_reported(harness, kind, "True", "2 "))["message"]
    assert "1 ready Pod of version" in message or "2 ready Pods of version" in message
    await harness.delete("Pod", "old-a", gracePeriodSeconds=0)
    await start_pod(harness, new, "new-b")
    await harness.delete("Pod", "old-b", gracePeriodSeconds=0)
    await until_reported(harness, kind, "False")
    started, ended = ("MixedVersions", "SingleVersion") if kind == "RLJob" else ("RollingOut", "Updated")
    await harness.until_event(ended)
    assert sum(event["count"] for event in await harness.events(started)) == 1
    await harness.wait_for_resyncs()
    before = list(recorder.writes)
    await harness.wait_for_resyncs()
    assert recorder.writes == before
