"""A training service, with the whole operator on a real API server. The test does what the controllers, the kubelet and
the head do."""

from __future__ import annotations

import base64
from typing import Any

from rljob_api.wire.contract import PORT_DRIVER
from rljob_api.wire.driver_status import SERVING, DriverStatus
from tests.integration.apiserver.manifests import MISSING, put_all, smallest
from tests.integration.apiserver.operator_harness import NAME, OperatorHarness, start_pod
from tests.support.hostile_drivers import Connection, serve

SERVICE: dict[str, Any] = {"data": MISSING, "rewards": MISSING, "service": {"clients": ["ann", "bob"]}}
WORKLOADS = (("Job", "head"), ("StatefulSet", "trainer"), ("Deployment", "rollout"))
CHILDREN = {
    "ConfigMap": {"config"},
    "NetworkPolicy": {"head", "rollout"},
    "PodDisruptionBudget": {"head"},
    "Secret": {"token", "clients"},
    "Service": {"head", "rollout"},
}
SERVED = "2 clients, 3 adapters, 1 busy"


async def answer(connection: Connection) -> None:
    await connection.answer(DriverStatus(phase=SERVING, waits_for=SERVED).model_dump_json().encode())


async def read_keys(harness: OperatorHarness) -> dict[str, str]:
    secret = await harness.get("Secret", f"{NAME}-clients")
    return {name: base64.b64decode(key).decode() for name, key in ((secret or {}).get("data") or {}).items()}


async def test_a_service_runs_says_whom_it_serves_and_keeps_its_keys(harness, loopback):
    await harness.start()
    await harness.create(put_all(smallest(), SERVICE))
    await harness.until_all_workloads(len(WORKLOADS))
    found: dict[str, set[str]] = {kind: set() for kind in CHILDREN}
    for child in await harness.list(*CHILDREN):
        found[child["kind"]].add(child["metadata"]["name"].removeprefix(f"{NAME}-"))
    assert found == CHILDREN

    async with serve(answer, address := f"{loopback}.77", PORT_DRIVER):
        for kind, role in WORKLOADS:
            pod = await start_pod(harness, kind, role)
            if role == "head":
                await harness.patch_status("Pod", pod, {"podIP": address, "podIPs": [{"ip": address}]})
        await harness.until_condition("Running")
        progressing = await harness.until_condition("Progressing")
        assert (progressing["reason"], progressing["message"]) == ("Serving", SERVED)

        before, head = await read_keys(harness), await harness.get("Job", f"{NAME}-head")
        assert head is not None
        assert before.keys() == {"ann", "bob"}
        await harness.patch("RLJob", NAME, {"spec": {"service": {"clients": ["ann", "eve"]}}})

        async def has_changed() -> bool:
            return (await read_keys(harness)).keys() == {"ann", "eve"}

        await harness.until("the key of another client", has_changed)
        assert (await read_keys(harness))["ann"] == before["ann"]
        after = await harness.get("Job", f"{NAME}-head")
        assert after is not None
        assert after["metadata"]["uid"] == head["metadata"]["uid"], "the head goes on"

    await harness.patch("RLJob", NAME, {"spec": {"suspend": True}})
    await harness.until_condition("Suspended")
    assert (await read_keys(harness))["ann"] == before["ann"], "a resumed service has the same"
