"""What the commands on jobs in a cluster take: submit, suspend, resume, retry, restart, explain, top, logs."""

from typing import Annotated, Literal

import typer

from rljob_cli.app import app
from rljob_cli.completion import complete_jobs
from rljob_cli.options import (
    ContextOption,
    FilenameOption,
    ForceOption,
    JobsArgument,
    KubeconfigOption,
    NameArgument,
    NamespaceOption,
    NoCallOption,
    OutputOption,
    SetOption,
    files_of,
)


@app.command()
def submit(
    jobs: JobsArgument = None,
    filenames: FilenameOption = None,
    overrides: SetOption = None,
    claim: Annotated[
        str | None, typer.Option(help="Claim for models and large data. Default: a new one, deleted with the job.")
    ] = None,
    claim_size: Annotated[str | None, typer.Option(metavar="QUANTITY", help="Size of a new claim: 20Gi.")] = None,
    storage_class: Annotated[str | None, typer.Option(help="StorageClass of a new claim.")] = None,
    access_mode: Annotated[
        Literal["ReadWriteMany", "ReadWriteOnce"],
        typer.Option(help="Of a new claim. ReadWriteOnce keeps the job's Pods on one node."),
    ] = "ReadWriteMany",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the objects; contact no cluster.")] = False,
    wait: Annotated[bool, typer.Option("-w", "--wait", help="Wait for the end of the job; show its progress.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Wait for the end of the job; show its logs.")] = False,
    no_call: NoCallOption = False,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
    output: Annotated[
        Literal["text", "json", "yaml"], typer.Option("-o", "--output", help="yaml: the objects as applied.")
    ] = "text",
) -> None:
    """Run local jobs in the cluster, with their functions, data and models."""
    from rljob_cli.cluster.client import Target
    from rljob_cli.submit.command import Options, submit_command
    from rljob_cli.submit.plan import ClaimOptions

    volume = ClaimOptions(claim, claim_size, storage_class, access_mode)
    options = Options(volume, dry_run, wait, follow, should_call=not (no_call or dry_run), output=output)
    target = Target(kubeconfig, context, namespace)
    raise typer.Exit(submit_command(target, files_of(jobs, filenames), overrides or [], options))


@app.command()
def suspend(
    name: NameArgument,
    force: ForceOption = False,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
    output: OutputOption = "text",
) -> None:
    """Release a job's nodes and keep its checkpoints."""
    from rljob_cli.cluster import client, commands

    target = client.Target(kubeconfig, context, namespace)
    raise typer.Exit(commands.control_command(target, "suspend", name, output, force=force))


def _add_control_command(verb: str, description: str) -> None:
    @app.command(verb, help=description)
    def control(
        name: NameArgument,
        namespace: NamespaceOption = None,
        context: ContextOption = None,
        kubeconfig: KubeconfigOption = None,
        output: OutputOption = "text",
    ) -> None:
        from rljob_cli.cluster import client, commands

        raise typer.Exit(commands.control_command(client.Target(kubeconfig, context, namespace), verb, name, output))


_add_control_command("resume", "Resume a suspended job from its last checkpoint.")


_add_control_command("retry", "Start a failed job again from its last checkpoint.")


@app.command()
def restart(
    name: NameArgument,
    roles: Annotated[
        list[str] | None,
        typer.Option(
            "--role",
            metavar="ROLE",
            help="head, trainer, rollout, reward, reward-NAME, agent or agent-NAME; repeatable. Default: all.",
        ),
    ] = None,
    force: ForceOption = False,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
    output: OutputOption = "text",
) -> None:
    """Replace a job's Pods, as the operator builds them now; training resumes from its last checkpoint."""
    from rljob_cli.cluster import client, commands

    target = client.Target(kubeconfig, context, namespace)
    raise typer.Exit(commands.restart_command(target, name, roles or [], force=force, output=output))


@app.command()
def explain(
    name: NameArgument,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
    output: OutputOption = "text",
) -> None:
    """Explain the state of a job in the cluster, and what to do about it."""
    from rljob_cli.cluster import client, commands

    raise typer.Exit(commands.explain_command(client.Target(kubeconfig, context, namespace), name, output))


@app.command()
def top(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="One job, with its roles and Pods.", autocompletion=complete_jobs),
    ] = None,
    watch: Annotated[bool, typer.Option("-w", "--watch", help="Refresh in place until Ctrl-C.")] = False,
    everywhere: Annotated[bool, typer.Option("-A", "--all-namespaces", help="Jobs of all namespaces.")] = False,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
    output: OutputOption = "text",
) -> None:
    """Show the jobs in the cluster: their progress, and what they wait for."""
    from rljob_cli.cluster import client, commands

    target = client.Target(kubeconfig, context, namespace)
    raise typer.Exit(commands.top_command(target, name, everywhere=everywhere, watch=watch, output=output))


@app.command()
def logs(
    name: NameArgument,
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
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
) -> None:
    """Print the logs of a job's Pods, merged."""
    from rljob_cli.cluster import client, commands
    from rljob_cli.cluster.logs import Selection

    selection = Selection(name, role, container, tail, previous)
    raise typer.Exit(commands.logs_command(client.Target(kubeconfig, context, namespace), selection, follow=follow))
