"""A bad day: CRDs that are older than the operator, or not there. It says so, writes nothing, and recovers by itself.

An API server of its own, since CRDs belong to the whole cluster.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import aiohttp
import pytest
import yaml
from manifests import smallest
from operator_world import World, Writes

from rljob_cluster.control_plane.control_plane import ControlPlane
from rljob_operator.kube import operator
from rljob_operator.kube.client import MERGE_PATCH, ApiError, connect
from tests.paths import ROOT

CRDS = ROOT / "crds"
CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


@pytest.fixture(scope="module")
def plane(tmp_path_factory):
    address = os.environ.get("RLJOB_TEST_CHART_ADDRESS", "127.31.0.1")
    with ControlPlane(tmp_path_factory.mktemp("older"), address=address) as running:
        yield running


@pytest.fixture
async def world(plane):
    api = await connect(str(plane.kubeconfig))
    made = World(api, "default", str(plane.kubeconfig))
    try:
        yield made
    finally:
        await made.stop()
        await api.close()


def without_scheduling(crd: dict[str, Any]) -> dict[str, Any]:
    older = copy.deepcopy(crd)
    spec = older["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    del spec["properties"]["scheduling"]
    spec["x-kubernetes-validations"] = [
        rule for rule in spec.get("x-kubernetes-validations", []) if "scheduling" not in rule["rule"]
    ]
    return older


async def test_crds_that_are_missing_or_older_are_told_and_mended_without_a_restart(
    world, caplog, monkeypatch, unused_tcp_port_factory
):
    monkeypatch.setattr(operator, "_CRD_RETRY_SECONDS", 0.3)
    port, writes = unused_tcp_port_factory(), Writes()
    crds = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(CRDS.glob("*.yaml"))}
    task = await world.start(writes, health_port=port)

    async def said() -> tuple[int, str]:
        try:
            async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/readyz") as answer:
                return answer.status, await answer.text()
        except aiohttp.ClientError:
            return 0, ""

    async def until_told(words: str) -> None:
        async def told() -> bool:
            status, text = await said()
            return status == 503 and words in text and words in caplog.text

        await world.until(f"readiness and log say: {words}", told)

    await until_told("apply the files in crds/")
    older = {name: without_scheduling(crd) if "rljobs" in name else crd for name, crd in crds.items()}
    for crd in older.values():
        await world.api.request("POST", CRD, body=crd)
    await until_told("rljobs.rljob.dev is older than this operator: it has no spec.scheduling")

    async def accepted() -> bool:
        try:
            return bool(await world.create(smallest()))
        except ApiError as error:  # the API server serves it soon, not at once
            if error.code != 404:
                raise
            return False

    await world.until("a job, by the older CRD", accepted)
    assert writes.made == [], "an operator that would lose fields writes nothing"
    for crd in crds.values():
        path = f"{CRD}/{crd['metadata']['name']}"
        await world.api.request("PATCH", path, body={"spec": crd["spec"]}, content_type=MERGE_PATCH)
    await world.all_children()

    async def ready() -> bool:
        return await said() == (200, "ok")

    await world.until("readiness", ready)
    assert not task.done()
