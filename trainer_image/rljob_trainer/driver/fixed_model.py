"""The trainer of a job that only evaluates: it has no ranks, and its weights are those of spec.model, which the
rollouts load themselves.

So the driver runs a job of no steps, whose one evaluation is that before the first step. Whatever would change weights
or write them is a mistake of the driver.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, cast

from rljob_api.manifest.job import RLJob
from rljob_api.manifest.status import EvaluationFigure
from rljob_api.run.comparisons import list_figures
from rljob_api.run.folder import FILE_METRICS
from rljob_api.run.metrics import read_metrics
from rljob_api.wire.driver_status import TrainerChoices
from rljob_api.wire.weights import OWN_WEIGHTS, WeightManifest
from rljob_trainer.concurrency import wait_forever
from rljob_trainer.driver.ports import Trainer
from rljob_trainer.run_folder.file_facts import Checkpoint

_NO_TRAINER = "a job that evaluates has no trainer"


def as_evaluation(job: RLJob) -> RLJob:
    """Return what the driver runs for a job with task evaluate: all sets before a step that never comes, and nothing to
    write at the end."""
    spec = job.spec
    sets = [each.model_copy(update={"at_start": True}) for each in spec.evaluation.sets]
    return job.with_spec(
        schedule=spec.schedule.model_copy(update={"steps": 0}),
        evaluation=spec.evaluation.model_copy(update={"at_start": True, "sets": sets, "best": None}),
        checkpoint=spec.checkpoint.model_copy(update={"export_policy": "never"}),
    )


def read_figures(run_dir: Path) -> list[EvaluationFigure]:
    """Return the results of the job, as its status shows them: from the lines of metrics.jsonl."""
    fields = set(EvaluationFigure.model_fields)
    figures = list_figures(read_metrics(run_dir / FILE_METRICS).evaluations)
    return [EvaluationFigure.model_validate(figure.model_dump(include=fields)) for figure in figures]


async def start_fixed(*, generation: str, checkpoint: Checkpoint | None, report: Callable[[str], None]) -> Trainer:
    """As StartTrainer."""
    return cast(Trainer, FixedModel())


class FixedModel:
    """Implements what the driver calls of Trainer."""

    choices = TrainerChoices()

    async def publish(self, version: int) -> WeightManifest:
        assert version == OWN_WEIGHTS.version, _NO_TRAINER
        return OWN_WEIGHTS

    def __getattr__(self, name: str) -> NoReturn:
        raise AssertionError(f"{name}: {_NO_TRAINER}")

    async def watch(self) -> NoReturn:
        await wait_forever()

    async def close(self) -> None:
        """Nothing runs."""
