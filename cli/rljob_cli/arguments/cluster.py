"""What the commands on jobs in a cluster take, most of which also take a run on this machine."""

import contextlib
from typing import Annotated

import typer

from rljob_cli.app import command
from rljob_cli.options import RUNS, DirectoryOption, ForceOption, OutputOption, SubmitOptions, Target

_COMPLETION_SECONDS = 2.0
"""For which the completion of names waits for the cluster."""


def complete_jobs(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of the jobs in the namespace that the options select, for the shell; an error completes
    nothing."""
    import asyncio

    from rljob_api.errors import RLJobError
    from rljob_cli.cluster.client import connect

    target = Target(*(context.params.get(option) for option in ("namespace", "context", "kubeconfig")))

    async def list_names() -> list[str]:
        async with asyncio.timeout(_COMPLETION_SECONDS), connect(target) as cluster:
            return sorted(job["metadata"]["name"] for job in await cluster.list_jobs())

    with contextlib.suppress(RLJobError, OSError, TimeoutError):
        return [name for name in asyncio.run(list_names()) if name.startswith(incomplete)]
    return []


_NameArgument = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="An RLJob in the cluster, or a run on this machine.", autocompletion=complete_jobs
    ),
]
_JobArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="An RLJob in the cluster.", autocompletion=complete_jobs)
]


def _refuse_run(name: str, target: Target) -> None:
    from rljob_cli.trajectories.log import find_here

    if folder := find_here(name, target):
        raise typer.BadParameter(f"{folder} is a run on this machine; the `rljob run` that started it resumes it")


@command()
def submit(options: SubmitOptions) -> int:
    """Run local jobs in the cluster, with their functions, data and models."""
    from rljob_cli.submit.command import submit_command

    return submit_command(options)


@command()
def suspend(
    *,
    name: _NameArgument,
    force: ForceOption = False,
    target: Target,
    output: OutputOption = "text",
) -> int:
    """Release a job's nodes and keep its checkpoints; or stop a run on this machine, which resumes like that, too."""
    from rljob_cli.trajectories.log import find_here

    if folder := find_here(name, target):
        from rljob_cli.ui import local

        return local.stop_run(folder, output)
    from rljob_cli.cluster import commands

    return commands.control_command(target, "suspend", name, output, force=force)


@command()
def resume(
    *,
    name: _JobArgument,
    retry: Annotated[bool, typer.Option("--retry", help="A failed job, too.")] = False,
    target: Target,
    output: OutputOption = "text",
) -> int:
    """Resume a suspended job, or with --retry a failed one, from its last checkpoint."""
    _refuse_run(name, target)
    from rljob_cli.cluster import commands

    return commands.control_command(target, "retry" if retry else "resume", name, output)


@command()
def restart(
    *,
    name: _JobArgument,
    roles: Annotated[
        list[str] | None,
        typer.Option(
            "--role",
            metavar="ROLE",
            help="head, trainer, rollout, reward, reward-NAME, agent or agent-NAME; repeatable. Default: all.",
        ),
    ] = None,
    force: ForceOption = False,
    target: Target,
    output: OutputOption = "text",
) -> int:
    """Replace a job's Pods, as the operator builds them now; training resumes from its last checkpoint."""
    _refuse_run(name, target)
    from rljob_cli.cluster import commands

    return commands.restart_command(target, name, roles or [], force=force, output=output)


@command()
def explain(*, name: _NameArgument, target: Target, output: OutputOption = "text") -> int:
    """Explain the state of a job in the cluster, or of a run on this machine, and what to do about it."""
    from rljob_cli.trajectories.log import find_here

    if folder := find_here(name, target):
        from rljob_cli.ui import local

        return local.explain_run(folder, output)
    from rljob_cli.cluster import commands

    return commands.explain_command(target, name, output)


@command()
def top(
    *,
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="One job, with its roles and Pods.", autocompletion=complete_jobs),
    ] = None,
    watch: Annotated[bool, typer.Option("-w", "--watch", help="Refresh in place until Ctrl-C.")] = False,
    everywhere: Annotated[bool, typer.Option("-A", "--all-namespaces", help="Jobs of all namespaces.")] = False,
    target: Target,
    output: OutputOption = "text",
) -> int:
    """Show the jobs in the cluster: their progress, and what they wait for; or a run on this machine."""
    if name:
        from rljob_cli.trajectories.log import find_here

        if folder := find_here(name, target):
            from rljob_cli.ui import local

            return local.explain_run(folder, output)
    elif not target.exists():  # said before two seconds of imports
        raise typer.BadParameter("no cluster: there is no kubeconfig; `rljob ls` lists the runs on this machine")
    from rljob_cli.cluster import commands

    return commands.top_command(target, name, everywhere=everywhere, watch=watch, output=output)


@command()
def logs(
    *,
    name: _NameArgument,
    role: Annotated[
        str | None,
        typer.Option(help="head, trainer, rollout, reward, reward-NAME, agent or agent-NAME. Default: all roles."),
    ] = None,
    container: Annotated[
        str | None, typer.Option("-c", "--container", help="vllm: a reward's sidecar. Default: the role's container.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Follow the logs, including those of replaced Pods.")
    ] = False,
    tail: Annotated[int | None, typer.Option(min=0, metavar="N", help="Only the last N lines of each Pod.")] = None,
    previous: Annotated[
        bool, typer.Option("-p", "--previous", help="Show the logs of the previous containers.")
    ] = False,
    target: Target,
) -> int:
    """Print the logs of a job's Pods, merged; or of a run on this machine, one after the other."""
    from rljob_cli.trajectories.log import find_here

    if folder := find_here(name, target):
        from rljob_cli.ui import local

        if container or previous:
            raise typer.BadParameter(f"-c and -p are of jobs in a cluster; all logs of this run are in {folder}/logs")
        return local.print_logs(folder, role, tail, follow=follow)
    from rljob_cli.cluster import commands
    from rljob_cli.cluster.logs import Selection

    return commands.logs_command(target, Selection(name, role, container, tail, previous), follow=follow)


@command("ls")
def list_all(
    *,
    everywhere: Annotated[bool, typer.Option("-A", "--all-namespaces", help="Jobs of all namespaces.")] = False,
    directory: DirectoryOption = RUNS,
    target: Target,
    output: OutputOption = "text",
) -> int:
    """List the runs on this machine and the jobs in the cluster."""
    from rljob_cli.ui import local

    return local.list_command(target, directory, everywhere=everywhere, output=output)
