"""The `rljob` command, also installed as `kubectl rljob`: parses arguments and calls one function per command.

Each command imports its heavy dependencies only when it runs, so that --help is fast. What several commands take is in
options.py.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from rljob_cli.completion import complete_jobs, complete_runs, complete_tasks
from rljob_cli.exits import EXIT_BAD_INPUT, EXIT_FAILED
from rljob_cli.groups import group_commands
from rljob_cli.options import (
    ContextOption,
    FilenameOption,
    ForceOption,
    Format,
    JobsArgument,
    KubeconfigOption,
    NameArgument,
    NamespaceOption,
    NetworkOption,
    NoCallOption,
    OutputOption,
    ReasonOption,
    SetOption,
    SortOption,
    VolumeOption,
    file_of,
    files_of,
)
from rljob_cli.output import choose_format, is_json, print_error
from rljob_cli.terminal import clean_streams


class _Commands(TyperGroup):
    """Lists commands by what they act on, and prints invalid arguments as JSON if `--output json` requests it."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, rows in group_commands(self.commands.values(), formatter.width):
            with formatter.section(title):
                formatter.write_dl(rows)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        arguments = sys.argv[1:] if args is None else list(args)
        with choose_format(arguments):
            if not is_json():
                return super().main(arguments, prog_name, complete_var, standalone_mode, windows_expand_args, **extra)
            try:
                code = super().main(arguments, prog_name, complete_var, standalone_mode=False)
            except Exception as error:
                if not hasattr(error, "format_message"):  # typer's usage errors have no public base class
                    raise
                print_error(error.format_message(), EXIT_BAD_INPUT)
                code = EXIT_BAD_INPUT
        sys.exit(code)


app = typer.Typer(
    cls=_Commands,
    help="Reinforcement-learning post-training of language models, on this machine or in a cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
_RUNS = Path("runs")


def _print_version(requested: bool) -> None:
    if requested:
        from rljob_cli.version import print_version

        print_version()
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print all versions.")
    ] = False,
) -> None:
    """Reinforcement-learning post-training of language models, on this machine or in a cluster."""


@app.command()
def run(
    jobs: JobsArgument = None,
    filenames: FilenameOption = None,
    directory: Annotated[Path, typer.Option("--dir", help="Parent of run folders; this run uses DIR/NAME.")] = _RUNS,
    overrides: SetOption = None,
    volumes: VolumeOption = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over; the existing run folder is renamed.")] = False,
    recorded: Annotated[
        str | None,
        typer.Option(
            "--from-trajectories",
            metavar="RUN",
            help="Train on the recorded episodes of a run (folder, job file or name), without rollouts and rewards; "
            "compare each step with the run's. Uses DIR/NAME-replay.",
            autocompletion=complete_runs,
        ),
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(
            metavar="A:B", help="With --from-trajectories: only these steps, from the run's weights before A."
        ),
    ] = None,
    output: Annotated[
        Literal["live", "plain", "json"],
        typer.Option("-o", "--output", help="live needs a terminal, else it is plain. json: one object per line."),
    ] = "live",
    network: NetworkOption = None,
    no_call: NoCallOption = False,
) -> None:
    """Run a job on this machine. A second run resumes from the last checkpoint."""
    from rljob_cli.commands import run_command

    job = file_of(jobs, filenames)
    if recorded is not None:
        from rljob_cli.replay.command import replay_command

        code = replay_command(job, recorded, directory, overrides or [], volumes or [], steps, fresh, output, network)
        raise typer.Exit(code)
    if steps is not None:
        raise typer.BadParameter("--steps is for --from-trajectories RUN; spec.schedule.steps is the length of a run")
    raise typer.Exit(run_command(job, directory, overrides or [], volumes or [], fresh, output, network, not no_call))


@app.command()
def validate(
    jobs: JobsArgument = None,
    filenames: FilenameOption = None,
    overrides: SetOption = None,
    volumes: VolumeOption = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="For `kubectl apply`: needs no GPU, memory or file of this machine.")
    ] = False,
    local: Annotated[bool, typer.Option("--local", help="For `rljob run` on this machine.")] = False,
    no_call: NoCallOption = False,
    output: OutputOption = "text",
) -> None:
    """Check job files, their rewards, data and models. Calls each function once, and starts nothing else."""
    from rljob_cli.commands import validate_command

    if cluster and local:
        raise typer.BadParameter("pass --cluster or --local; without both, validate says what differs")
    target: Literal["local", "cluster"] | None = "cluster" if cluster else "local" if local else None
    files = files_of(jobs, filenames)
    raise typer.Exit(validate_command(files, overrides or [], volumes or [], output, target, not no_call))


@app.command()
def plan(
    jobs: JobsArgument = None,
    filenames: FilenameOption = None,
    overrides: SetOption = None,
    volumes: VolumeOption = None,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME|SIZE", help="Memory of each GPU: h100-80gb, 80GiB. Default: labels of nodePool."),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=0, metavar="COUNT", help="GPUs that there are in all. Default: enough.")
    ] = None,
    output: OutputOption = "text",
) -> None:
    """Print the memory that each role needs, by part, and what would make it fit."""
    from rljob_cli.commands import plan_command

    raise typer.Exit(plan_command(files_of(jobs, filenames), overrides or [], volumes or [], gpu, gpus, output))


@app.command()
def render(
    jobs: JobsArgument = None,
    filenames: FilenameOption = None,
    overrides: SetOption = None,
    output: Annotated[
        Literal["yaml", "json"], typer.Option("-o", "--output", help="json: one List, as kubectl prints it.")
    ] = "yaml",
) -> None:
    """Print the objects that the operator creates for a job. The token is a placeholder."""
    from rljob_cli.commands import render_command

    raise typer.Exit(render_command(files_of(jobs, filenames), overrides or [], output))


@app.command()
def init(
    directory: Annotated[Path | None, typer.Argument(metavar="DIR", show_default=False, help="A new folder.")] = None,
    task: Annotated[
        str | None,
        typer.Option(help="What to train for. Default: sums; with --data own.", autocompletion=complete_tasks),
    ] = None,
    agent: Annotated[
        Literal["loop", "program", "environment"] | None,
        typer.Option(
            help="loop: a simulated user (user.py) and tools (tools.py). program: your own, which calls the model "
            "(agent.py). environment: a class that replies to the model (environment.py)."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="hf://org/name or a folder. Default: a small one.")] = None,
    num_gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus", min=0, max=16, help="Write the job for N GPUs; 0: CPUs. Default: what this machine has."
        ),
    ] = None,
    data: Annotated[str | None, typer.Option(help="Your rows: a file, folder or glob, or hf://org/name.")] = None,
    prompt: Annotated[str | None, typer.Option(metavar="COLUMN", help="Column of the prompt in --data.")] = None,
    answer: Annotated[str | None, typer.Option(metavar="COLUMN", help="Column of the answer in --data.")] = None,
    list_tasks: Annotated[bool, typer.Option("--list-tasks", help="Print the tasks, and write nothing.")] = False,
    output: OutputOption = "text",
) -> None:
    """Write a job to start from, with a reward function and data."""
    from rljob_cli.check import scaffold
    from rljob_cli.check.own_data import OwnData

    if list_tasks:
        raise typer.Exit(scaffold.list_tasks(output))
    if directory is None:
        raise typer.BadParameter("pass the folder to write: rljob init DIR")
    if data is None and (prompt or answer):
        raise typer.BadParameter("--prompt and --answer name columns of --data")
    rows = OwnData(data, prompt, answer) if data else None
    options = scaffold.Options(task, agent, model, rows, num_gpus)
    raise typer.Exit(scaffold.write_scaffold(directory, options, output))


@app.command("test-reward")
def try_reward(
    jobs: JobsArgument = None,
    filenames: FilenameOption = None,
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
    output: OutputOption = "text",
) -> None:
    """Score completions with a job's reward, in the same server that training uses."""
    from rljob_cli.check.try_reward import try_reward_command

    job = file_of(jobs, filenames)
    code = try_reward_command(job, overrides or [], reward, completion or [], answer, prompt, file, network, output)
    raise typer.Exit(code)


@app.command("test-agent")
def try_agent(
    jobs: JobsArgument = None,
    filenames: FilenameOption = None,
    row: Annotated[int, typer.Option(min=0, help="Row of data.train, from 0.")] = 0,
    episodes: Annotated[int, typer.Option(min=1, help="How many episodes the base model plays.")] = 1,
    answer: Annotated[
        list[str] | None,
        typer.Option(help="An answer of the policy, in order; repeatable. Needs no model, and takes seconds."),
    ] = None,
    overrides: SetOption = None,
    volumes: VolumeOption = None,
    network: NetworkOption = None,
    full: Annotated[bool, typer.Option("--full", help="Show long texts in full.")] = False,
    output: OutputOption = "text",
) -> None:
    """Play an episode with a job's user and tools, program or environment, and show each turn; trains nothing."""
    from rljob_cli.agents.command import try_agent_command

    job = file_of(jobs, filenames)
    code = try_agent_command(job, overrides or [], volumes or [], row, episodes, answer or [], network, full, output)
    raise typer.Exit(code)


def _choose_target(kubeconfig: str | None, context: str | None, namespace: str | None) -> Any:
    """Return the cluster in which a run is; None: it is on this machine."""
    options = kubeconfig, context, namespace
    if not any(options):
        return None
    from rljob_cli.cluster.client import Target

    return Target(*options)


@app.command()
def trajectories(
    run: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN | diff RUN_A RUN_B",
            help="A run's folder, job file, or job's name.",
            autocompletion=complete_runs,
        ),
    ],
    step: Annotated[int | None, typer.Option(help="Only this step.")] = None,
    lane: Annotated[str | None, typer.Option(help="train or eval. diff: eval if both runs have one.")] = None,
    reward: Annotated[str | None, typer.Option(help="Only this reward's scores.")] = None,
    invalid: Annotated[bool, typer.Option("--invalid", help="Only samples without a valid score.")] = False,
    min_score: Annotated[float | None, typer.Option(help="Only samples with at least this score.")] = None,
    max_score: Annotated[float | None, typer.Option(help="Only samples with at most this score.")] = None,
    group: Annotated[int | None, typer.Option(help="Only this group of its step.")] = None,
    eval_set: Annotated[str | None, typer.Option(help="Only this evaluation set, by name.")] = None,
    reason: ReasonOption = None,
    sort: SortOption = None,
    limit: Annotated[
        int | None, typer.Option(min=0, help="Maximum rows; 0: all. Default: text 20, conversations 5, json all.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Show long texts in full.")] = False,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Conversations: the text of each span of tokens, and which were trained.")
    ] = False,
    directory: Annotated[Path, typer.Option("--dir", help="Parent of the run folders.")] = _RUNS,
    output: Annotated[Format, typer.Option("-o", "--output", help="json: one object per line.")] = "text",
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
) -> None:
    """Show the samples of a run with all their scores, newest step first; or compare two runs."""
    from rljob_cli.trajectories.command import trajectories_command
    from rljob_cli.trajectories.log import Filter

    selected = Filter(step, lane, reward, invalid, min_score, max_score, group, eval_set, reason)
    code = trajectories_command(
        run,
        selected,
        directory=directory,
        limit=limit,
        full=full,
        output=output,
        tokens=tokens,
        sort=sort,
        target=_choose_target(kubeconfig, context, namespace),
    )
    raise typer.Exit(code)


@app.command()
def evaluate(
    jobs: JobsArgument = None,
    filenames: FilenameOption = None,
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="SOURCE|RUN@STEP",
            help="A folder, hf://org/name or pvc://claim/path; or a checkpoint of a run: its step, best, last or "
            "export. Repeatable. Default: spec.model.",
            autocompletion=complete_runs,
        ),
    ] = None,
    directory: Annotated[
        Path, typer.Option("--dir", help="Parent of run folders; results are in DIR/NAME-evaluate.")
    ] = _RUNS,
    overrides: SetOption = None,
    volumes: VolumeOption = None,
    network: NetworkOption = None,
    should_submit: Annotated[bool, typer.Option("--submit", help="In the cluster: one job for each model.")] = False,
    wait: Annotated[
        bool, typer.Option("-w", "--wait", help="With --submit: wait for the end of all jobs, and print the table.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --submit: print the objects; contact no cluster.")
    ] = False,
    claim: Annotated[
        str | None, typer.Option(help="With --submit: claim for models and large data. Default: a new one each.")
    ] = None,
    no_call: NoCallOption = False,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
    output: OutputOption = "text",
) -> None:
    """Evaluate models on a job's held-out data, without a trainer, and compare them in one table."""
    job = file_of(jobs, filenames)
    if should_submit:
        from rljob_cli.cluster.client import Target
        from rljob_cli.evaluate.cluster import submit_evaluation
        from rljob_cli.submit.command import Options
        from rljob_cli.submit.plan import ClaimOptions

        options = Options(
            ClaimOptions(claim), dry_run, wait, follow=False, should_call=not (no_call or dry_run), output=output
        )
        target = Target(kubeconfig, context, namespace)
        raise typer.Exit(submit_evaluation(target, job, models or [], directory, overrides or [], options))
    if wait or dry_run or claim:
        raise typer.BadParameter("--wait, --dry-run and --claim are for --submit")
    from rljob_cli.evaluate.command import evaluate_command

    code = evaluate_command(job, models or [], directory, overrides or [], volumes or [], network, not no_call, output)
    raise typer.Exit(code)


@app.command()
def export(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run's folder, job file, or job's name.", autocompletion=complete_runs),
    ],
    to: Annotated[
        str,
        typer.Option("--to", metavar="DIR|URL", help="A new folder for the model and its card; s3://... or hf://..."),
    ],
    step: Annotated[str, typer.Option(metavar="N|last|best", help="Which checkpoint.")] = "last",
    public: Annotated[bool, typer.Option("--public", help="A new repository of hf://org/name is public.")] = False,
    directory: Annotated[Path, typer.Option("--dir", help="Parent of the run folders.")] = _RUNS,
    output: OutputOption = "text",
) -> None:
    """Write a checkpoint of a run as a Hugging Face model, also of a run that failed, was stopped, or is running."""
    from rljob_cli.export.command import export_command

    raise typer.Exit(export_command(run, step, to, directory, output, is_public=public))


@app.command()
def report(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run's folder, job file, or job's name.", autocompletion=complete_runs),
    ],
    file: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE.html", help="Default: report.html in the run.")
    ] = None,
    should_open: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    reason: ReasonOption = None,
    sort: SortOption = None,
    directory: Annotated[Path, typer.Option("--dir", help="Parent of the run folders.")] = _RUNS,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
) -> None:
    """Write a run as one HTML page: curves, waits, failures, samples with their scores, versions, the job."""
    from rljob_cli.report.command import report_command

    target = _choose_target(kubeconfig, context, namespace)
    code = report_command(run, directory, file, should_open=should_open, reason=reason, sort=sort, target=target)
    raise typer.Exit(code)


@app.command()
def ui(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN|FOLDER]...",
            show_default=False,
            help="Runs, by folder, job file or name, or folders with runs. Default: all in --dir.",
            autocompletion=complete_runs,
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1. 0: a free one.")] = 0,
    should_open: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    directory: Annotated[Path, typer.Option("--dir", help="Parent of the run folders.")] = _RUNS,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
) -> None:
    """Serve the page of `report`, alive: steps, waits and samples while the run trains; several runs in one chart."""
    from rljob_cli.ui.command import ui_command

    target = _choose_target(kubeconfig, context, namespace)
    raise typer.Exit(ui_command(runs or [], directory, port, should_open=should_open, target=target))


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


def main() -> None:
    clean_streams()
    try:
        try:
            app(prog_name="kubectl rljob" if Path(sys.argv[0]).name == "kubectl-rljob" else None)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # `rljob trajectories | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    main()
