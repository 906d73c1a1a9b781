"""An operator with CRDs of the next minor version: it runs, leaves alone what it does not know, and is idle."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from rljob_cluster.control_plane.control_plane import ControlPlane
from rljob_core.kube.client import connect
from tests.integration.apiserver.manifests import put_all, smallest
from tests.integration.apiserver.operator_harness import Manifest, OperatorHarness, WriteRecorder
from tests.integration.apiserver.test_upgrade import CRDS, create_when_served
from tests.paths import ROOT
from tests.support import fast_yaml

TEMPO = {"type": "object", "properties": {"beats": {"type": "integer"}}}


def change_crd(crd: Manifest) -> Manifest:
    """A CRD that has fields in addition."""
    crd["metadata"]["annotations"] = {"rljob.dev/version": "0.3.0"}
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    schema["spec"]["properties"] |= {"tempo": TEMPO, "mood": {"type": "string"}}
    return crd


@pytest.fixture
async def newer_cluster(tmp_path, loopback) -> AsyncIterator[OperatorHarness]:
    with ControlPlane(tmp_path, address=f"{loopback}.8", components=("etcd", "kube-apiserver")) as running:
        api = await connect(str(running.kubeconfig))
        harness = OperatorHarness(api, "default", str(running.kubeconfig))
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
        await api.request("POST", "/api/v1/namespaces/default/serviceaccounts", body=account)
        for path in sorted((ROOT / "crds").glob("*.yaml")):
            await api.request("POST", CRDS, body=change_crd(fast_yaml.load(path.read_text())))
        yield harness
        await harness.stop()
        await api.close()


async def test_operator_runs_with_crds_of_the_next_version(newer_cluster, caplog):
    harness = newer_cluster
    await create_when_served(harness, smallest())
    recorder = WriteRecorder()
    await harness.start(recorder, resync_seconds=0.4)
    await harness.until_all_workloads()
    await harness.wait_for_resyncs()
    recorder.writes.clear()
    await harness.wait_for_resyncs()
    assert recorder.writes == []
    assert "CRD rljobs.rljob.dev is newer than this operator (0.3.0, operator" in caplog.text

    await harness.create(put_all(smallest(name="moody"), {"mood": "grim"}))
    (event,) = await harness.until_event("OutdatedOperator")
    assert "which does not know spec.mood; upgrade the operator" in event["message"]
    assert not [w for w in await harness.workloads() if w["metadata"]["name"].startswith("moody")]
    await harness.patch("RLJob", "moody", {"spec": {"mood": None}})
    await harness.until_condition("Failed", "False", name="moody")
