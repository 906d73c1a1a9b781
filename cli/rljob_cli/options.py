"""Arguments and options that several commands of `rljob` take.

A command that takes files takes `JobsArgument` and `FilenameOption`, and one that prints a result takes `OutputOption`.
"""

from pathlib import Path
from typing import Annotated, Literal, TypeVar

import typer

from rljob_cli.completion import complete_jobs

Given = TypeVar("Given", str, list[str], None)


def check_text(given: Given) -> Given:
    """Callback of options that models and functions read. Bytes that are no UTF-8 are halves of characters in Python,
    which neither a tokenizer nor a request takes."""
    for text in given if isinstance(given, list) else [given or ""]:
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise typer.BadParameter("is not UTF-8 text; pass it in a file, or correct the bytes")
    return given


RUNS = Path("runs")
"""Default parent of the folders of runs."""
JobsArgument = Annotated[
    list[Path] | None,
    typer.Argument(metavar="JOB.yaml", show_default=False, help="Files with an RLJob each; - is stdin."),
]
FilenameOption = Annotated[
    list[Path] | None, typer.Option("-f", "--filename", metavar="JOB.yaml", help="The same, as in kubectl; repeatable.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Change a field: spec.schedule.steps=3.")
]
VolumeOption = Annotated[
    list[str] | None,
    typer.Option("--volume", metavar="CLAIM=DIR", help="Local folder to use for a claim (pvc://); repeatable."),
]
PolicyOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="RLJobPolicy of the namespace: kubectl get rljobpolicy default -o yaml."),
]
NoCallOption = Annotated[
    bool, typer.Option("--no-call", help="Do not call each reward function once before anything starts.")
]
NetworkOption = Annotated[
    str | None, typer.Option(metavar="127.X.Y.0", help="Loopback block of the run's Pods. Default: a free one.")
]
ContextOption = Annotated[str | None, typer.Option(help="Context of the kubeconfig. Default: the current one.")]
KubeconfigOption = Annotated[str | None, typer.Option(help="Kubeconfig. Default: $KUBECONFIG, then ~/.kube/config.")]
NamespaceOption = Annotated[str | None, typer.Option("-n", "--namespace", help="Default: the context's.")]
NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="An RLJob in the cluster.", autocompletion=complete_jobs)
]
Format = Literal["text", "json"]
ForceOption = Annotated[bool, typer.Option("--force", help="Even if training loses its steps: no claim has them.")]
OutputOption = Annotated[Format, typer.Option("-o", "--output", help="Format of the result and of errors.")]
"""With json, stdout has nothing but JSON."""

ReasonOption = Annotated[
    str | None, typer.Option(help="Only samples with a result that failed for this reason: timeout, exception, ...")
]
Sort = Literal["latency", "reward"]
SortOption = Annotated[
    Sort | None, typer.Option(help="Slowest reward, or highest score, first; with --reward those of this reward.")
]


def files_of(jobs: list[Path] | None, filenames: list[Path] | None) -> list[Path]:
    """Return the files of the arguments and of -f, in this order."""
    files = [*(jobs or []), *(filenames or [])]
    if not files:
        raise typer.BadParameter("pass a job's file: JOB.yaml, -f JOB.yaml, or - for stdin")
    return files


def file_of(jobs: list[Path] | None, filenames: list[Path] | None) -> Path:
    """Return the only file, for a command that takes one job."""
    file, *more = files_of(jobs, filenames)
    if more:
        raise typer.BadParameter(f"takes one job's file, got {len(more) + 1}")
    return file
