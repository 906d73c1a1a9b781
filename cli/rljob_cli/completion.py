"""Shell completion of the names of jobs in the cluster, and of tasks. Silent: an error completes nothing.

The shell's script is typer's (`rljob --install-completion`).
"""

import contextlib

import typer

from rljob_cli.options import Target

_CLUSTER_TIMEOUT_SECONDS = 2.0


def complete_jobs(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of the jobs in the namespace that the options select."""
    import asyncio

    from rljob_api.errors import RLJobError
    from rljob_cli.cluster.client import connect

    target = Target(*(context.params.get(option) for option in ("namespace", "context", "kubeconfig")))

    async def list_names() -> list[str]:
        async with asyncio.timeout(_CLUSTER_TIMEOUT_SECONDS), connect(target) as cluster:
            return sorted(job["metadata"]["name"] for job in await cluster.list_jobs())

    with contextlib.suppress(RLJobError, OSError, TimeoutError):
        return [name for name in asyncio.run(list_names()) if name.startswith(incomplete)]
    return []


def complete_tasks(incomplete: str) -> list[str]:
    """Return the tasks of `rljob init`."""
    from rljob_cli.check.scaffold import TASKS

    return [name for name in TASKS if name.startswith(incomplete)]
