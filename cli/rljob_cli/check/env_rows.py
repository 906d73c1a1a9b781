"""One row of an environment (an env:// source), read from the runner's server as the head does.

Invariant: when `read_row` returns or raises, no process that it started is alive.
"""

import asyncio
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.job_sections import DataSource
from rljob_api.manifest.services.runner import RUNNER_SERVICE, Runner
from rljob_api.wire.calls import CallRequest, CallResult, RowsCall, RowsReply
from rljob_api.wire.contract import PORT_SERVICE, READ_ROWS, UrlPath
from rljob_cli.check.try_reward import TOKEN, service_children
from rljob_cli.check.waits import report_waits, wait_until_ready
from rljob_cli.local.cluster import LocalCluster, running
from rljob_cli.local.network import claim_block
from rljob_core.backend import Manifest

_STOP_SECONDS = 1.0
_NUM_SHOWN = 500


def read_row(
    job: RLJob,
    source: DataSource,
    field: str,
    number: int,
    claims: Mapping[str, Path],
    say: Callable[[str], None],
    block: str | None = None,
) -> dict[str, Any]:
    """Return row `number` of an env:// source, from 0. Raise UserError if the environment does not return it, or its
    server does not start. `field`: spec.data.train."""
    assert source.env_split is not None
    place = f"{field}.source: {source.source}"
    if source.limit is not None and number >= source.limit:
        raise UserError(f"{place}: --row {number}: limit is {source.limit}")
    call = RowsCall(split=source.env_split, start=source.offset + number, count=1)
    job = _with_one_runner(job)
    with tempfile.TemporaryDirectory(prefix="rljob-") as folder:
        cluster = LocalCluster(job, claim_block(folder, block), Path(folder), claims)
        result = asyncio.run(_read(cluster, service_children(job, {RUNNER_SERVICE}), call, say))
    if not result.valid:
        raise UserError(f"{place}: the environment gave no rows: {result.message}")
    rows = RowsReply.model_validate(result.value, extra="ignore").rows
    if not rows:
        raise UserError(f"{place}: --row {number}: it has fewer rows; name another split, or a lower number")
    return rows[0]


def _with_one_runner(job: RLJob) -> RLJob:
    runner = (job.spec.agent.runner or Runner()).model_copy(update={"replicas": 1, "autoscaling": None, "slots": 1})
    agent = job.spec.agent.model_copy(update={"runner": runner})
    return job.with_spec(agent=agent)


async def _read(
    cluster: LocalCluster, children: Sequence[Manifest], call: RowsCall, say: Callable[[str], None]
) -> CallResult:
    async with running(cluster, children, _STOP_SECONDS, report_waits(cluster, {RUNNER_SERVICE: "the runner"}, say)):
        pod = await wait_until_ready(cluster, RUNNER_SERVICE)
        return await _ask(f"http://{pod['status']['podIP']}:{cluster.network.port(PORT_SERVICE)}", call)


async def _ask(url: str, call: RowsCall) -> CallResult:
    request = CallRequest(id="row", function=READ_ROWS, arguments=call.model_dump())
    headers, timeout = {"Authorization": f"Bearer {TOKEN}"}, aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(url, headers=headers, timeout=timeout) as session,
        session.post(UrlPath.CALL, json=request.model_dump(mode="json")) as response,
    ):
        body = await response.read()
    if response.status != 200:
        raise UserError(f"the runner answered {response.status}: {body.decode(errors='replace')[:_NUM_SHOWN]}")
    return CallResult.model_validate_json(body, extra="ignore")
