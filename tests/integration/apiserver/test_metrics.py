"""The operator's /metrics while a job is created, suspended, fails and is deleted on a real API server."""

from __future__ import annotations

import re

import aiohttp

from tests.integration.apiserver.manifests import smallest
from tests.integration.apiserver.operator_harness import NAME


async def test_phase_and_failures_of_a_job_are_exported_until_it_is_deleted(harness, unused_tcp_port):
    await harness.start(metrics_port=unused_tcp_port)
    async with aiohttp.ClientSession() as session:

        async def until_phases(*expected):
            async def are_exported():
                async with session.get(f"http://127.0.0.1:{unused_tcp_port}/metrics") as response:
                    text = await response.text()
                return (
                    re.findall(r'rljob_job_phase\{name="\w+",namespace="[\w-]+",phase="(\w+)"\} 1.0', text)
                    == [*expected]
                    and text
                )

            return await harness.until(f"the phases {expected}", are_exported)

        await harness.create(smallest())
        await until_phases("Pending")
        await harness.patch("RLJob", NAME, {"spec": {"suspend": True}})
        await until_phases("Suspended")
        await harness.patch("RLJob", NAME, {"spec": {"suspend": False}})
        await harness.patch("RLJob", NAME, {"spec": {"head": {"template": {"spec": {"containers": 1}}}}})
        text = await until_phases("Failed")
        assert 'rljob_job_failures_total{reason="InvalidSpec"} 1.0' in text
        await harness.delete("RLJob", NAME)
        await until_phases()
