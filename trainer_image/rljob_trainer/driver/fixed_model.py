"""The trainer of a job that only evaluates: it has no ranks, and its weights are those of spec.model, which the
rollouts load themselves.

So the driver runs a job of no steps, whose one evaluation is that before the first step. Whatever would change weights
or write them is a mistake of the driver.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from rljob_api.manifest.job import RLJob
from rljob_api.wire.driver_status import TrainerChoices
from rljob_api.wire.weights import OWN_WEIGHTS, WeightManifest
from rljob_trainer.driver.ports import FreedMemory, Trainer
from rljob_trainer.episodes.types import TokenFacts, TrainRow, UpdateMetrics, UpdateVersions
from rljob_trainer.run_folder.file_facts import Checkpoint, FileFacts

_NO_TRAINER = "a job that evaluates has no trainer"


def as_evaluation(job: RLJob) -> RLJob:
    """Return what the driver runs for a job with task evaluate: all sets before a step that never comes, and nothing to
    write at the end."""
    spec = job.spec
    sets = [each.model_copy(update={"at_start": True}) for each in spec.evaluation.sets]
    return job.with_spec(
        schedule=spec.schedule.model_copy(update={"steps": 0}),
        evaluation=spec.evaluation.model_copy(update={"at_start": True, "sets": sets, "best": None}),
        checkpoint=spec.checkpoint.model_copy(update={"export": "never"}),
    )


async def start_fixed(*, generation: str, checkpoint: Checkpoint | None, report: Callable[[str], None]) -> Trainer:
    """As StartTrainer."""
    return FixedModel()


class FixedModel:
    """Implements Trainer."""

    choices = TrainerChoices()

    async def publish(self, version: int) -> WeightManifest:
        assert version == OWN_WEIGHTS.version, _NO_TRAINER
        return OWN_WEIGHTS

    async def score(self, rows: Sequence[TrainRow]) -> list[NDArray[np.float32]]:
        raise AssertionError("nothing trains")

    async def inspect(self, rows: Sequence[TrainRow]) -> list[TokenFacts]:
        raise AssertionError(_NO_TRAINER)

    async def accumulate(self, rows: Sequence[TrainRow], versions: UpdateVersions) -> None:
        raise AssertionError(_NO_TRAINER)

    async def apply(self, denominator: float) -> UpdateMetrics:
        raise AssertionError(_NO_TRAINER)

    async def set_steps(self, steps: int) -> None:
        raise AssertionError(_NO_TRAINER)

    async def save(self, folder: Path) -> None:
        raise AssertionError(_NO_TRAINER)

    async def saved(self) -> dict[str, FileFacts]:
        raise AssertionError(_NO_TRAINER)

    async def export(self, folder: Path, tokenizer_source: str, checkpoint: Checkpoint | None = None) -> float | None:
        raise AssertionError(_NO_TRAINER)

    async def free(self) -> FreedMemory:
        raise AssertionError(_NO_TRAINER)

    async def restore(self) -> None:
        raise AssertionError(_NO_TRAINER)

    async def offer_weights(self) -> None:
        raise AssertionError(_NO_TRAINER)

    async def withdraw_weights(self) -> None:
        raise AssertionError(_NO_TRAINER)

    async def watch(self) -> NoReturn:
        while True:
            await asyncio.Event().wait()

    async def close(self) -> None:
        """Nothing runs."""
