"""Shell completion of names: runs on this machine, jobs in the cluster. Silent: an error completes nothing.

The shell's script is typer's (`rljob --install-completion`).
"""

import contextlib
from pathlib import Path

import typer

_CLUSTER_TIMEOUT_SECONDS = 2.0


def complete_runs(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of the run folders."""
    parent = Path(context.params.get("directory") or "runs")
    with contextlib.suppress(OSError):
        names = sorted(folder.name for folder in parent.iterdir() if folder.is_dir())
        return [name for name in names if name.startswith(incomplete)]
    return []


def complete_jobs(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of the jobs in the namespace that the options select."""
    import asyncio

    from rljob_api.errors import RLJobError
    from rljob_cli.cluster.client import Target, connect

    target = Target(*(context.params.get(option) for option in ("kubeconfig", "context", "namespace")))

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
