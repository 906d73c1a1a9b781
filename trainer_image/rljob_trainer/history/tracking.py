"""What the driver gives to trackers, and which trackers a job has.

`trackers` has their clients, `delivery` sends. Invariant: a tracker never stops or delays training; what it loses is
counted and shown.
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_api.run.gauges import flatten, name_series
from rljob_api.run.metrics import AnyRecord
from rljob_api.run.summaries import DeliveryCounts
from rljob_api.wire.redaction import Redactor, find_values
from rljob_inputs.machine.installation import describe_tracker, has_module
from rljob_trainer.episodes.types import Group
from rljob_trainer.history.delivery import Delivery
from rljob_trainer.history.trackers import MlFlow, TensorBoard, TrackedRecord, Tracker, WeightsAndBiases
from rljob_trainer.history.trajectory_log import to_text
from rljob_trainer.run_folder.location import read_run_id

FLUSH_SECONDS = 15.0
"""At the end of the run, for what waits."""
CLOSE_SECONDS = 20.0
"""To close all clients. With the time of a checkpoint, it fits into the grace period of the head's Pod."""
_MAX_CHARACTERS = 10_000
"""Limit of a text in the table of samples."""


class Trackers:
    """All trackers of a job."""

    def __init__(
        self, deliveries: Sequence[Delivery] = (), redactor: Redactor | None = None, *, num_samples: int = 0
    ) -> None:
        """`num_samples`: of each step and evaluation, for the table of samples. `redactor`: hides the job's secrets."""
        self._deliveries, self._num_samples = deliveries, num_samples
        self._redactor = redactor or Redactor()

    def log(self, record: AnyRecord, groups: Sequence[Group] = ()) -> None:
        samples = describe_samples(record.step, groups, self._num_samples) if self._deliveries else []
        tracked = TrackedRecord(
            name_series(record), record.step, flatten(record), samples=self._redactor.redact(samples)
        )
        self._submit(lambda tracker: tracker.log(tracked))

    def restart_at(self, step: int) -> None:
        self._submit(lambda tracker: tracker.restart_at(step))

    def counts(self) -> dict[str, DeliveryCounts]:
        return {delivery.name: delivery.counts() for delivery in self._deliveries}

    async def flush(self, seconds: float = FLUSH_SECONDS) -> dict[str, DeliveryCounts]:
        """Wait for what is not sent, and return the counts of each tracker."""
        waits = (asyncio.to_thread(delivery.flush, seconds) for delivery in self._deliveries)
        counts = await asyncio.gather(*waits)
        return {each.name: found for each, found in zip(self._deliveries, counts, strict=True)}

    async def close(self, seconds: float = CLOSE_SECONDS) -> None:
        ends_at = time.monotonic() + seconds
        await asyncio.gather(*(asyncio.to_thread(delivery.close, ends_at) for delivery in self._deliveries))

    def _submit(self, send: Callable[[Tracker], None]) -> None:
        for delivery in self._deliveries:
            delivery.submit(send)


def describe_samples(step: int, groups: Sequence[Group], count: int) -> list[tuple[Any, ...]]:
    """Return rows of SAMPLE_COLUMNS: the first samples of groups at even distances, then the second ones."""
    longest = max((len(group.episodes) for group in groups), default=0)
    num_groups = min(count, len(groups))
    spread = [groups[i * len(groups) // num_groups] for i in range(num_groups)]
    pairs = [(group, group.episodes[i]) for i in range(longest) for group in spread if i < len(group.episodes)]
    return [
        (
            step,
            episode.group,
            _shorten(group.prompt.prompt),
            _shorten(group.prompt.ground_truth),
            _shorten(episode.text),
            episode.score,
            episode.advantage,
            str(episode.end),
        )
        for group, episode in pairs[:count]
    ]


def _shorten(value: Any) -> str:
    if value is None:
        return ""
    text = to_text(value)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]} ... ({len(text)} characters)"


def build_trackers(job: RLJob, run_dir: Path) -> Trackers:
    """Return the trackers of spec.tracking. Raise UserError if one cannot work here."""
    tracking, run_id = job.spec.tracking, read_run_id(run_dir)
    for package, field_name in tracking.packages.items():
        if not has_module(package):
            raise UserError(f"spec.tracking.{field_name} {describe_tracker(package)}, or use RLJob's own image")
    deliveries: list[Delivery] = []
    if tracking.tensorboard:
        deliveries.append(Delivery("tensorboard", partial(TensorBoard, run_dir / "tensorboard")))
    if tracking.wandb_project:
        deliveries.append(Delivery("wandb", partial(WeightsAndBiases, job, run_dir, run_id)))
    if tracking.mlflow_experiment:
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            raise UserError(
                "spec.tracking.mlflowExperiment is set, but MLFLOW_TRACKING_URI is not; set it in spec.head.env"
            )
        deliveries.append(Delivery("mlflow", partial(MlFlow, job, run_id)))
    redactor = Redactor(find_values(job.to_manifest()))
    return Trackers(deliveries, redactor, num_samples=tracking.wandb_samples if tracking.wandb_project else 0)
