"""Records of a run. A test gives the fields that matter to it; the others have defaults."""

from __future__ import annotations

from typing import Any

from rljob_api.run.metrics import EvaluationRecord, Metrics, StepRecord
from rljob_api.run.sessions import ContainerFailure
from rljob_api.run.summaries import RunSummary
from rljob_api.run.trajectories import ResultRow, SampleRow


def step_record(step: int = 1, **fields: Any) -> StepRecord:
    return StepRecord(step=step, **fields)


def evaluation_record(step: int = 0, accuracy: float | None = None, **fields: Any) -> EvaluationRecord:
    return EvaluationRecord(step=step, accuracy=accuracy, **fields)


def metrics_of(*records: StepRecord | EvaluationRecord) -> Metrics:
    steps = tuple(record for record in records if isinstance(record, StepRecord))
    return Metrics(steps, tuple(record for record in records if isinstance(record, EvaluationRecord)))


def run_summary(**fields: Any) -> RunSummary:
    return RunSummary.model_validate({"name": "j", "phase": "Succeeded", "steps": 1, "total_steps": 1} | fields)


def container_failure(**fields: Any) -> ContainerFailure:
    given = {"pod": "p-1", "role": "rollout", "container": "c", "exit_code": 1, "reason": "Error", "message": ""}
    return ContainerFailure.model_validate(given | fields)


def result_row(score: float | None = None, name: str = "r", **fields: Any) -> ResultRow:
    return ResultRow(name=name, valid=score is not None, score=score, **fields)


def sample_row(**fields: Any) -> SampleRow:
    given = {"step": 1, "lane": "train", "group": 0, "sample": 0, "prompt_index": 0, "prompt": "p", "completion": "c"}
    return SampleRow.model_validate(given | fields)
