"""What the commands on job files take: run, validate, plan, render, init, test-reward, test-agent, evaluate."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from rljob_cli.app import app
from rljob_cli.completion import complete_runs, complete_tasks
from rljob_cli.options import (
    RUNS,
    ContextOption,
    FilenameOption,
    JobsArgument,
    KubeconfigOption,
    NamespaceOption,
    NetworkOption,
    NoCallOption,
    OutputOption,
    PolicyOption,
    SetOption,
    VolumeOption,
    check_text,
    file_of,
    files_of,
)


@app.command()
def run(
    jobs: JobsArgument = None,
    filenames: FilenameOption = None,
    directory: Annotated[Path, typer.Option("--dir", help="Parent of run folders; this run uses DIR/NAME.")] = RUNS,
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
    policy: PolicyOption = None,
    no_call: NoCallOption = False,
    output: OutputOption = "text",
) -> None:
    """Check job files, their rewards, data and models. Calls each function once, and starts nothing else."""
    from rljob_cli.commands import validate_command

    if cluster and local:
        raise typer.BadParameter("pass --cluster or --local; without both, validate says what differs")
    target: Literal["local", "cluster"] | None = "cluster" if cluster else "local" if local else None
    files = files_of(jobs, filenames)
    raise typer.Exit(validate_command(files, overrides or [], volumes or [], output, target, not no_call, policy))


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
    policy: PolicyOption = None,
    namespace: Annotated[
        str | None,
        typer.Option("-n", "--namespace", help="With -n, --context or --kubeconfig: the cluster's RLJobPolicy counts."),
    ] = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
    output: OutputOption = "text",
) -> None:
    """Print the memory that each role needs, by part, and what would make it fit."""
    from rljob_cli.commands import plan_command

    files = files_of(jobs, filenames)
    target = None
    if namespace or context or kubeconfig:
        from rljob_cli.cluster.client import Target

        if policy is not None:
            raise typer.BadParameter("pass --policy FILE, or -n, --context and --kubeconfig, which read the cluster's")
        target = Target(kubeconfig, context, namespace)
    raise typer.Exit(plan_command(files, overrides or [], volumes or [], gpu, gpus, output, policy, target))


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
    reward: Annotated[str | None, typer.Option(help="Name of the reward. Default: all that the job serves.")] = None,
    completion: Annotated[
        list[str] | None,
        typer.Option(help="Completion to score. Repeat it to score a group.", callback=check_text),
    ] = None,
    answer: Annotated[str | None, typer.Option(help="The ground truth.", callback=check_text)] = None,
    prompt: Annotated[str, typer.Option(help="The prompt that the model was given.", callback=check_text)] = "",
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
        typer.Option(
            help="An answer of the policy, in order; repeatable. Needs no model, and takes seconds.",
            callback=check_text,
        ),
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
    ] = RUNS,
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
