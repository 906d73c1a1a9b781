"""Two operators and one Lease on a real API server, in this process and as processes."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Any

import aiohttp
import pytest

from rljob_operator.operator import LeaseLostError
from tests.integration.apiserver.manifests import smallest
from tests.integration.apiserver.operator_harness import NAME, OperatorHarness
from tests.support.waiting import DEADLINE_SECONDS


def lease_path(harness: OperatorHarness) -> str:
    return f"/apis/coordination.k8s.io/v1/namespaces/{harness.namespace}/leases/rljob-operator"


async def get_holder(harness: OperatorHarness) -> str:
    lease = await harness.api.request("GET", lease_path(harness))
    return str(lease["spec"].get("holderIdentity") or "")


class Disconnect:
    """A hook that disconnects an operator from the API server."""

    is_active = False

    async def __call__(self, request: aiohttp.ClientRequest) -> None:
        if self.is_active:
            raise aiohttp.ClientConnectionError("disconnected by the test")


async def test_second_operator_takes_over_after_a_disconnect_and_after_an_end(harness):
    settings = {"lease": True, "lease_namespace": harness.namespace, "lease_seconds": 2}
    disconnect = Disconnect()
    first = await harness.start(disconnect, **settings)
    await harness.create(smallest())
    await harness.until_all_workloads()
    second = await harness.start(**settings)
    holder = await get_holder(harness)
    disconnect.is_active = True

    async def other_holder() -> str:
        now = await get_holder(harness)
        return now if now != holder else ""

    takeover: asyncio.Task[Any] = asyncio.create_task(harness.until("another holder", other_holder))
    with pytest.raises(LeaseLostError):
        await asyncio.wait_for(first, DEADLINE_SECONDS)
    harness.tasks.remove(first)
    holder = await takeover
    await harness.delete_until_recreated("Deployment", f"{NAME}-rollout")
    await harness.start(**settings)
    second.cancel()  # as upon SIGTERM
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.wait_for(second, DEADLINE_SECONDS)
    assert await get_holder(harness) != holder, "it was released"
    await harness.until("the third holder", other_holder)


async def start_process(harness: OperatorHarness, *options: str) -> asyncio.subprocess.Process:
    options = (*options, f"--kubeconfig={harness.kubeconfig}", f"--namespace={harness.namespace}")
    options = (*options, f"--lease-namespace={harness.namespace}", "--metrics-port=0", "--health-port=0")
    return await asyncio.create_subprocess_exec(sys.executable, "-m", "rljob_operator", *options)


async def test_process_releases_its_lease_upon_sigterm(harness):
    process = await start_process(harness)
    try:
        await harness.create(smallest())
        await harness.until_all_workloads()
        process.terminate()
        assert await asyncio.wait_for(process.wait(), DEADLINE_SECONDS) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    assert await get_holder(harness) == ""


@pytest.mark.slow
async def test_second_process_takes_over_when_the_first_is_killed(harness):
    processes = [await start_process(harness, "--lease-seconds=2")]
    try:
        await harness.create(smallest())
        await harness.until_all_workloads()
        processes.append(await start_process(harness, "--lease-seconds=2"))
        processes[0].kill()
        await harness.delete_until_recreated("Deployment", f"{NAME}-rollout")
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
