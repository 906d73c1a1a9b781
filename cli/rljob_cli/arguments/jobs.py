"""What the commands on job files take: try, run, validate, plan, init, test-reward, test-agent, evaluate."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from rljob_cli.app import command
from rljob_cli.options import (
    EvaluateOptions,
    JobFiles,
    NetworkOption,
    OutputOption,
    PlanOptions,
    RunOptions,
    ServeOptions,
    SetOption,
    TryAgentOptions,
    TryRewardOptions,
    ValidateOptions,
    VolumeOption,
)


def complete_tasks(incomplete: str) -> list[str]:
    """Return the tasks of `rljob init`."""
    from rljob_cli.check.scaffold import TASKS

    return [name for name in TASKS if name.startswith(incomplete)]


@command()
def run(options: RunOptions) -> int:
    """Run a job on this machine. A second run resumes from the last checkpoint."""
    from rljob_cli.commands import run_command

    return run_command(options)


@command("try")
def try_job(
    *, files: JobFiles, overrides: SetOption = None, volumes: VolumeOption = None, network: NetworkOption = None
) -> int:
    """Try all of a job at once: its data, reward, agent and one step, with the small model of .models if it is here."""
    from rljob_cli.commands import try_command

    options = RunOptions(files=files, overrides=overrides, volumes=volumes, network=network, output="plain")
    return try_command(options)


@command()
def validate(options: ValidateOptions) -> int:
    """Check job files, their rewards, data and models. Calls each function once, and starts nothing else."""
    from rljob_cli.commands import validate_command

    if options.cluster and options.local:
        raise typer.BadParameter("pass --cluster or --local; without both, validate says what differs")
    return validate_command(options)


@command()
def plan(options: PlanOptions) -> int:
    """Print the memory that each role needs, by part, and what does not fit."""
    from rljob_cli.commands import plan_command

    return plan_command(options)


@command()
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
    sources: Annotated[
        list[str] | None,
        typer.Option(
            "--from", metavar="FILE", help="Write the job from a verl script or yaml, a prime-rl toml or a TRL script."
        ),
    ] = None,
    list_tasks: Annotated[bool, typer.Option("--list-tasks", help="Print the tasks, and write nothing.")] = False,
    output: OutputOption = "text",
) -> int:
    """Write a job to start from, with a reward function and data."""
    from rljob_cli.check import scaffold
    from rljob_cli.check.own_data import OwnData

    if list_tasks:
        return scaffold.list_tasks(output)
    if directory is None:
        raise typer.BadParameter("pass the folder to write: rljob init DIR")
    if sources:
        if len(sources) > 1:
            raise typer.BadParameter("--from takes one file; make a job of each")
        if any(each is not None for each in (task, agent, model, num_gpus, data, prompt, answer)):
            raise typer.BadParameter("--from takes all from its file; leave out the other options, and edit the job")
        from rljob_cli.check.other_trainers import write_translation

        return write_translation(directory, sources[0], output)
    if data is None and (prompt or answer):
        raise typer.BadParameter("--prompt and --answer name columns of --data")
    rows = OwnData(data, prompt, answer) if data else None
    options = scaffold.Options(task, agent, model, rows, num_gpus)
    return scaffold.write_scaffold(directory, options, output)


@command("test-reward")
def try_reward(options: TryRewardOptions) -> int:
    """Score completions with a job's reward, in the same server that training uses."""
    from rljob_cli.check.try_reward import try_reward_command

    return try_reward_command(options)


@command("test-agent")
def try_agent(options: TryAgentOptions) -> int:
    """Play an episode with a job's user and tools, program or environment, and show each turn; trains nothing."""
    from rljob_cli.agents.command import try_agent_command

    return try_agent_command(options)


@command()
def serve(options: ServeOptions) -> int:
    """Serve a model for training through Tinker's API, on this machine: clients run loops, it trains and samples."""
    from rljob_cli.serve.command import serve_command

    return serve_command(options)


@command()
def evaluate(options: EvaluateOptions) -> int:
    """Evaluate models on a job's held-out data, without a trainer, and compare them in one table."""
    from rljob_cli.evaluate.command import evaluate_command

    return evaluate_command(options)
