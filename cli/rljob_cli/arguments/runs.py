"""What the commands on the files of runs take: trajectories, export, report, ui."""

from pathlib import Path
from typing import Annotated, Any

import typer

from rljob_cli.app import app
from rljob_cli.completion import complete_runs
from rljob_cli.options import (
    RUNS,
    ContextOption,
    Format,
    KubeconfigOption,
    NamespaceOption,
    OutputOption,
    ReasonOption,
    SortOption,
)


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
    directory: Annotated[Path, typer.Option("--dir", help="Parent of the run folders.")] = RUNS,
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
    directory: Annotated[Path, typer.Option("--dir", help="Parent of the run folders.")] = RUNS,
    output: OutputOption = "text",
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
) -> None:
    """Write a checkpoint of a run as a Hugging Face model, also of a run that failed, was stopped, or is running."""
    from rljob_cli.export.command import export_command

    target = _choose_target(kubeconfig, context, namespace)
    raise typer.Exit(export_command(run, step, to, directory, output, is_public=public, target=target))


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
    directory: Annotated[Path, typer.Option("--dir", help="Parent of the run folders.")] = RUNS,
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
    directory: Annotated[Path, typer.Option("--dir", help="Parent of the run folders.")] = RUNS,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
) -> None:
    """Serve the page of `report`, alive: steps, waits and samples while the run trains; several runs in one chart."""
    from rljob_cli.ui.command import ui_command

    target = _choose_target(kubeconfig, context, namespace)
    raise typer.Exit(ui_command(runs or [], directory, port, should_open=should_open, target=target))
