"""What the commands on the files of runs take: trajectories, export, report, ui."""

from typing import Annotated

import typer

from rljob_cli.app import command
from rljob_cli.options import (
    RUNS,
    DirectoryOption,
    ExportOptions,
    OpenOption,
    ReportOptions,
    RunArgument,
    ShowOptions,
    Target,
    complete_runs,
)


def _require(options: ExportOptions | ReportOptions | ShowOptions, run: str) -> None:
    """Raise UserError if there is no such run here: before the imports of what shows it, which take a second."""
    from rljob_cli.trajectories.log import find_run

    if not options.target:
        find_run(run, options.directory)


@command()
def trajectories(
    *,
    run: RunArgument,
    step: Annotated[int | None, typer.Option(help="Only this step.")] = None,
    lane: Annotated[str | None, typer.Option(help="train or eval.")] = None,
    reward: Annotated[str | None, typer.Option(help="Only this reward's scores.")] = None,
    invalid: Annotated[bool, typer.Option("--invalid", help="Only samples without a valid score.")] = False,
    min_score: Annotated[float | None, typer.Option(help="Only samples with at least this score.")] = None,
    max_score: Annotated[float | None, typer.Option(help="Only samples with at most this score.")] = None,
    group: Annotated[int | None, typer.Option(help="Only this group of its step.")] = None,
    eval_set: Annotated[str | None, typer.Option(help="Only this evaluation set, by name.")] = None,
    reason: Annotated[
        str | None, typer.Option(help="Only samples with a result that failed for this reason: timeout, exception, ...")
    ] = None,
    options: ShowOptions,
) -> int:
    """Show the samples of a run with all their scores, newest step first."""
    _require(options, run)
    from rljob_cli.trajectories.command import trajectories_command
    from rljob_cli.trajectories.index import Query

    query = Query(step, lane, reward, reason, "invalid" * invalid, min_score, max_score, group=group, eval_set=eval_set)
    return trajectories_command(run, query, options)


@command()
def export(options: ExportOptions) -> int:
    """Write a checkpoint of a run as a Hugging Face model, also of a run that failed, was stopped, or is running."""
    _require(options, options.run)
    from rljob_cli.export.command import export_command

    return export_command(options)


@command()
def report(options: ReportOptions) -> int:
    """Write a run as one HTML page: curves, waits, failures, samples with their scores, versions, the job."""
    _require(options, options.run)
    from rljob_cli.report.command import report_command

    return report_command(options)


@command()
def ui(
    *,
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
    should_open: OpenOption = False,
    directory: DirectoryOption = RUNS,
    target: Target,
) -> int:
    """Serve the page of `report`, alive: steps, waits and samples while the run trains; several runs in one chart."""
    from rljob_cli.ui.command import ui_command

    return ui_command(runs or [], directory, port, should_open=should_open, target=target)
