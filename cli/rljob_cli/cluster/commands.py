"""The commands on a cluster's jobs, from arguments to exit code.

1: the cluster did not answer, or refused. 2: the job does not exist, or does not allow what the command does.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from rich.console import RenderableType

from rljob_api.errors import UserError
from rljob_cli.cluster import control, log_lines, logs, top
from rljob_cli.cluster.client import Cluster, ClusterError, Target, connect
from rljob_cli.cluster.explain import explain
from rljob_cli.cluster.explanation import format_explanation
from rljob_cli.cluster.observation import fetch_observation
from rljob_cli.cluster.rewards import fetch_rewards
from rljob_cli.exits import EXIT_FAILED, EXIT_INTERRUPTED, guard
from rljob_cli.tables import show
from rljob_operator.backend import utc_now

_OUTPUTS = ("text", "json")
_WATCH_SECONDS = 2.0


def _on_cluster(target: Target, output: str, command: Callable[[Cluster], Awaitable[int]]) -> int:
    async def connected() -> int:
        async with connect(target) as cluster:
            return await command(cluster)

    def guarded() -> int:
        if output not in _OUTPUTS:
            raise UserError(f"--output must be one of {', '.join(_OUTPUTS)}, got {output}")
        try:
            return asyncio.run(connected())
        except ClusterError as error:
            print(error, file=sys.stderr)
            return EXIT_FAILED
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED

    return guard(guarded)


def control_command(verb: str, name: str, target: Target, output: str) -> int:
    """Suspend, resume or retry a job."""

    async def command(cluster: Cluster) -> int:
        job = await cluster.get_job(name)
        change = control.plan_change(verb, job, utc_now())
        if change.patch is not None:
            await cluster.patch_job(name, change.patch)
        print(json.dumps(control.describe_change(verb, job, change)) if output == "json" else change.message)
        return 0

    return _on_cluster(target, output, command)


def explain_command(name: str, target: Target, output: str) -> int:
    async def command(cluster: Cluster) -> int:
        explanation = explain(await fetch_observation(cluster, name))
        if output == "json":
            print(json.dumps(explanation.to_json()))
        else:
            print(format_explanation(explanation, utc_now()))
        return 0

    return _on_cluster(target, output, command)


def top_command(name: str | None, target: Target, *, everywhere: bool, watch: bool, output: str) -> int:
    async def view(cluster: Cluster) -> tuple[RenderableType, Any]:
        """Return the drawn tables, and the same as JSON."""
        if name is None:
            rows = top.view_jobs(await cluster.list_jobs(everywhere), utc_now())
            return top.draw_jobs(rows, cluster.namespace, everywhere), [asdict(row) for row in rows]
        manifest = await cluster.get_job(name)
        pods, usage = await top.fetch_pods(cluster, name)
        job = top.view_job(manifest, pods, usage, utc_now(), await fetch_rewards(cluster, manifest, pods))
        return top.draw_job(job), asdict(job)

    async def command(cluster: Cluster) -> int:
        if name and everywhere:
            raise UserError("-A lists the jobs of all namespaces; leave out NAME, or pass -n NAMESPACE")
        if watch and output == "json":
            raise UserError("--watch shows a table; to poll JSON, run the command repeatedly without --watch")

        async def draw() -> RenderableType:
            return (await view(cluster))[0]

        if watch:
            await top.watch(draw, _WATCH_SECONDS)
        elif output == "json":
            print(json.dumps((await view(cluster))[1]))
        else:
            show(await draw())
        return 0

    return _on_cluster(target, output, command)


def logs_command(target: Target, selection: log_lines.Selection, *, follow: bool) -> int:
    async def command(cluster: Cluster) -> int:
        if follow and selection.previous:
            raise UserError("--previous shows containers that have ended, so there is nothing to follow; leave out -f")
        return await (logs.follow_logs(cluster, selection) if follow else logs.print_logs(cluster, selection))

    return _on_cluster(target, "text", command)
