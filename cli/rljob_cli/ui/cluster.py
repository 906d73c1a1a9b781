"""`rljob ui` of jobs in a cluster: the page reads a copy of the run's files, which follows those of the head."""

import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path

import aiohttp

from rljob_api.errors import TransientError, UserError
from rljob_cli.cluster.client import Cluster, ClusterError
from rljob_cli.cluster.commands import on_cluster
from rljob_cli.cluster.head_files import FolderCopy, open_head
from rljob_cli.run.endpoint import Endpoint
from rljob_cli.ui.runs import WatchedRun
from rljob_cli.ui.server import serve

_REFRESH_SECONDS = 3.0


@on_cluster
async def ui_of_jobs(cluster: Cluster, jobs: Sequence[str], port: int, should_open: bool) -> int:
    if not jobs:
        raise UserError("pass the names of the jobs whose runs the page shows")
    runs: dict[str, WatchedRun] = {}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rljob-")))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        following = []
        for job in dict.fromkeys(jobs):
            head = await stack.enter_async_context(open_head(cluster, job))
            (folder / job).mkdir()
            copy = FolderCopy(session, head, folder / job)
            try:
                await copy.refresh()
            except TransientError as error:
                raise ClusterError(f"RLJob {cluster.namespace}/{job}: {error}") from None
            runs[job] = WatchedRun(job, folder / job, partial(Endpoint, head.driver, head.token))
            following.append(tasks.create_task(_follow(copy)))
        code = await serve(lambda: runs, port, should_open)
        for task in following:
            task.cancel()
        return code


async def _follow(copy: FolderCopy) -> None:
    """Keep the copy up to date. While no head answers, it stays as it is."""
    while True:
        await asyncio.sleep(_REFRESH_SECONDS)
        with suppress(TransientError):
            await copy.refresh()
