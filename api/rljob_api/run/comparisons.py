"""evaluation.json: what `rljob evaluate` writes, the results of several models on the same sets."""

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from rljob_api.run.base import Count, Record, Score
from rljob_api.run.folder import FILE_EVALUATION
from rljob_api.run.metrics import EvaluationRecord


class Figure(Record):
    """One estimator on one set."""

    set: str
    """Name of the set."""
    name: str
    """Name of the estimator, such as accuracy."""
    value: Score | None = None
    """Null: no episode was scored."""
    low: Score | None = None
    high: Score | None = None
    """Its 95% confidence interval. Null: not known."""
    num_prompts: Count = 0
    """Prompts of the set."""
    num_failed: Count = 0
    """Episodes that the agent failed."""
    num_left_out: Count = 0
    """Other episodes without this figure."""


class ModelResult(Record):
    """One model."""

    model: str
    """As it was given to --model."""
    source: str
    """spec.model.source of its job."""
    job: str
    """Name of its job."""
    run: str
    """Folder of its run, with metrics and trajectories."""
    phase: str
    """Succeeded, Failed, Interrupted, or Pending: not evaluated yet."""
    message: str = ""
    """Why it failed."""
    figures: list[Figure] = []
    """By set, in the order of the job."""


class Comparison(Record):
    """All models."""

    job: str
    """Name of the job in the file."""
    models: list[ModelResult] = []
    """In the order in which they were given."""


def list_figures(records: Iterable[EvaluationRecord]) -> list[Figure]:
    """Return the figures of a run that only evaluates, in the order of its sets."""
    return [figure for record in records for figure in _list_estimators(record)]


def _list_estimators(record: EvaluationRecord) -> Iterator[Figure]:
    num_samples = record.samples_per_prompt
    figure = partial(
        Figure,
        set=record.set,
        num_prompts=record.num_prompts,
        num_failed=record.num_failed,
        num_left_out=record.num_left_out,
    )
    mean = _name_mean(num_samples)
    yield figure(name=mean, value=record.accuracy, low=record.accuracy_low, high=record.accuracy_high)
    for k, value in record.pass_at.items():
        low, high = record.pass_at_low.get(k), record.pass_at_high.get(k)
        yield figure(name=f"pass@{k}", value=value, low=low, high=high)
    if record.majority is not None:
        low, high = record.majority_low, record.majority_high
        yield figure(name=f"maj@{num_samples}", value=record.majority, low=low, high=high)


def _name_mean(num_samples: int) -> str:
    return "accuracy" if num_samples == 1 else f"avg@{num_samples}"


def write_comparison(folder: Path, comparison: Comparison) -> Path:
    path = folder / FILE_EVALUATION
    path.write_text(comparison.model_dump_json(indent=1) + "\n")
    return path
