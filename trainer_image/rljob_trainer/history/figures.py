"""The results of a job that only evaluates, as its status shows them: from the lines of metrics.jsonl."""

from pathlib import Path

from rljob_api.manifest.status import EvaluationFigure
from rljob_api.run.comparisons import list_figures
from rljob_api.run.folder import FILE_METRICS
from rljob_api.run.metrics import read_metrics


def read_figures(run_dir: Path) -> list[EvaluationFigure]:
    fields = set(EvaluationFigure.model_fields)
    figures = list_figures(read_metrics(run_dir / FILE_METRICS).evaluations)
    return [EvaluationFigure.model_validate(figure.model_dump(include=fields)) for figure in figures]
