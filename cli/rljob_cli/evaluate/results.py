"""The results of all models: as a table with what it leaves out, or as JSON."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from rljob_api.run.comparisons import Comparison, ModelResult
from rljob_cli.output import print_json
from rljob_cli.run.summary import describe_uncounted
from rljob_cli.tables import Column, FittedTable, build_table, show


def build_comparison_table(comparison: Comparison) -> FittedTable:
    """A row for each estimator of each set, a column for each model."""
    keys = dict.fromkeys((figure.set, figure.name) for model in comparison.models for figure in model.figures)
    header: list[str | Column] = ["set", "figure", "prompts", *(Column(model.model) for model in comparison.models)]
    rows = [
        (
            set_,
            name,
            _count_prompts(comparison.models, set_),
            *(_show(model, set_, name) for model in comparison.models),
        )
        for set_, name in keys
    ]
    return build_table(header, rows)


def _count_prompts(models: Sequence[ModelResult], set_: str) -> str:
    counts = {figure.num_prompts for model in models for figure in model.figures if figure.set == set_}
    return " to ".join(str(count) for count in sorted({min(counts), max(counts)}))


def _show(model: ModelResult, set_: str, name: str) -> str:
    found = [figure for figure in model.figures if (figure.set, figure.name) == (set_, name)]
    if not found:
        return model.phase.lower() if model.phase != "Succeeded" else "-"
    [figure] = found
    if figure.value is None:
        return "-"
    shown = f"{figure.value:.3f}"
    if figure.low is not None and figure.high is not None:
        shown += f" [{figure.low:.3f}, {figure.high:.3f}]"
    return shown


def describe_notes(comparison: Comparison) -> list[str]:
    """Return lines about what the table leaves out: models that failed, and episodes that a figure does not count."""
    told = [model for model in comparison.models if model.phase == "Failed" or model.message]
    notes = [f"{model.model}: {model.phase}: {model.message}" for model in told]
    for model in comparison.models:
        for set_ in dict.fromkeys(figure.set for figure in model.figures):
            first = next(figure for figure in model.figures if figure.set == set_)
            if text := describe_uncounted(first):
                notes.append(f"{model.model}: {set_}: {text}")
    return notes


def print_comparison(comparison: Comparison, output: str, file: Path) -> None:
    """`file`: evaluation.json, next to the folders of the runs."""
    if output == "json":
        print_json(comparison.model_dump(mode="json") | {"file": str(file)})
        return
    show(build_comparison_table(comparison))
    for line in describe_notes(comparison):
        print(line)
    for model in comparison.models:
        if model.figures:
            print(f"samples of {model.model}: rljob trajectories {shlex.quote(model.run)}")
    print(file, flush=True)
