"""The `rljob` command, also installed as `kubectl rljob`: parses arguments and calls one function per command.

Each command imports its heavy dependencies only when it runs, so that --help is fast.
"""

import io
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Reinforcement-learning post-training of language models, on this machine or in a cluster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_RUNS = Path("runs")
JobArgument = Annotated[Path, typer.Argument(metavar="JOB.yaml", help="A file with one RLJob.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Change a field: spec.schedule.steps=3.")
]
VolumeOption = Annotated[
    list[str] | None,
    typer.Option("--volume", metavar="CLAIM=DIR", help="Local folder to use for a claim (pvc://); repeatable."),
]
NetworkOption = Annotated[
    str | None, typer.Option(metavar="127.X.Y.0", help="Loopback block of the run's Pods. Default: a free one.")
]
ContextOption = Annotated[str | None, typer.Option(help="Context of the kubeconfig. Default: the current one.")]
KubeconfigOption = Annotated[str | None, typer.Option(help="Kubeconfig. Default: $KUBECONFIG, then ~/.kube/config.")]
NamespaceOption = Annotated[str | None, typer.Option("-n", "--namespace", help="Default: the context's.")]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="An RLJob in the cluster.")]
OutputOption = Annotated[str, typer.Option("-o", "--output", help="text or json.")]


@app.command()
def run(
    job: JobArgument,
    directory: Annotated[Path, typer.Option("--dir", help="Parent of run folders; this run uses DIR/NAME.")] = _RUNS,
    overrides: SetOption = None,
    volumes: VolumeOption = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over; the existing run folder is renamed.")] = False,
    output: Annotated[str, typer.Option(help="live, plain or json. live needs a terminal, else it is plain.")] = "live",
    network: NetworkOption = None,
) -> None:
    """Run a job on this machine. A second run resumes from the last checkpoint."""
    from rljob_cli.commands import run_command

    raise typer.Exit(run_command(job, directory, overrides or [], volumes or [], fresh, output, network))


@app.command()
def validate(job: JobArgument, overrides: SetOption = None, volumes: VolumeOption = None) -> None:
    """Check a job file, its rewards, data and model; start nothing."""
    from rljob_cli.commands import validate_command

    raise typer.Exit(validate_command(job, overrides or [], volumes or []))


@app.command()
def render(job: JobArgument, overrides: SetOption = None) -> None:
    """Print the Kubernetes objects that the operator creates for a job. The token is a placeholder."""
    from rljob_cli.commands import render_command

    raise typer.Exit(render_command(job, overrides or []))


@app.command()
def init(directory: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")]) -> None:
    """Write a job with a reward function and a few lines of data to start from."""
    from rljob_cli.check.scaffold import write_scaffold

    raise typer.Exit(write_scaffold(directory))


@app.command("test-reward")
def try_reward(
    job: JobArgument,
    reward: Annotated[
        str | None, typer.Option(help="Name of the reward. Default: the first reward that the job serves.")
    ] = None,
    completion: Annotated[
        list[str] | None, typer.Option(help="Completion to score. Repeat it to score a group.")
    ] = None,
    answer: Annotated[str | None, typer.Option(help="The ground truth.")] = None,
    prompt: Annotated[str, typer.Option(help="The prompt that the model was given.")] = "",
    file: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines with completion, answer, prompt; other keys become extra_info. If the reward scores "
            "groups, rows with the same prompt (or `group`) are a group."
        ),
    ] = None,
    overrides: SetOption = None,
    network: NetworkOption = None,
) -> None:
    """Score completions with a job's reward, in the same server that training uses."""
    from rljob_cli.check.try_reward import try_reward_command

    code = try_reward_command(job, overrides or [], reward, completion or [], answer, prompt, file, network)
    raise typer.Exit(code)


@app.command()
def trajectories(
    run: Annotated[
        list[str], typer.Argument(metavar="RUN | diff RUN_A RUN_B", help="A run's folder, job file, or job's name.")
    ],
    step: Annotated[int | None, typer.Option(help="Only this step.")] = None,
    lane: Annotated[str | None, typer.Option(help="train or eval. diff: eval if both runs have one.")] = None,
    reward: Annotated[str | None, typer.Option(help="Only this reward's scores.")] = None,
    invalid: Annotated[bool, typer.Option("--invalid", help="Only samples without a valid score.")] = False,
    min_score: Annotated[float | None, typer.Option(help="Only samples with at least this score.")] = None,
    max_score: Annotated[float | None, typer.Option(help="Only samples with at most this score.")] = None,
    group: Annotated[int | None, typer.Option(help="Only this group of its step.")] = None,
    limit: Annotated[int | None, typer.Option(min=0, help="Maximum rows; 0: all. Default: table 20, json all.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Show long texts in full.")] = False,
    directory: Annotated[Path, typer.Option("--dir", help="Parent of the run folders.")] = _RUNS,
    output: Annotated[str, typer.Option("-o", "--output", help="table or json (one object per line).")] = "table",
) -> None:
    """Show the samples of a run with all their scores, newest step first; or compare two runs."""
    from rljob_cli.trajectories.command import trajectories_command
    from rljob_cli.trajectories.log import Filter

    selected = Filter(step, lane, reward, invalid, min_score, max_score, group)
    raise typer.Exit(trajectories_command(run, selected, directory=directory, limit=limit, full=full, output=output))


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


_add_control_command("suspend", "Release a job's nodes and keep its checkpoints.")
_add_control_command("resume", "Resume a suspended job from its last checkpoint.")
_add_control_command("retry", "Start a failed job again from its last checkpoint.")


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
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One job, with its roles and Pods.")] = None,
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
        str | None, typer.Option(help="head, trainer, rollout, reward or reward-NAME. Default: all roles.")
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


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for names that the terminal's encoding does not have
    app()


if __name__ == "__main__":
    main()
