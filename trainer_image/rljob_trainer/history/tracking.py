"""Trackers: TensorBoard, Weights & Biases and MLflow. Each receives the flat numbers of a step or evaluation.

Invariant: a tracker never stops training; one that fails is logged and removed.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_trainer.history.prometheus import PrometheusMetrics

log = logging.getLogger(__name__)


class Tracker(Protocol):
    def log(self, kind: str, step: int, numbers: dict[str, float]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files through tensorboard's own writer. torch's writer would import all of torch into the driver."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))

    def restart_at(self, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        step += step > 0  # TensorBoard also drops the step in the event, which is done unless it is 0
        self._writer.add_event(Event(wall_time=time.time(), step=step, file_version="brain.Event:2"))
        self._writer.add_event(Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START)))

    def log(self, kind: str, step: int, numbers: dict[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=f"{kind}/{name}", simple_value=value) for name, value in numbers.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _import_client(package: str, field: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UserError(
            f"spec.tracking.{field} is set, but {package} is not installed; install rljob-trainer[{package}]"
        ) from error


class WeightsAndBiases:
    """One run per job; a resumed job continues it."""

    def __init__(self, project: str, job: RLJob) -> None:
        name = f"{job.metadata.namespace}-{job.metadata.name}"
        run_id = job.metadata.uid or name
        self._run = _import_client("wandb", "wandbProject").init(
            project=project, name=job.metadata.name, id=run_id, resume="allow", config=job.to_manifest()["spec"]
        )

    def log(self, kind: str, step: int, numbers: dict[str, float]) -> None:
        self._run.log({f"{kind}/{name}": value for name, value in numbers.items()} | {"step": step})

    def close(self) -> None:
        self._run.finish()


class MlFlow:
    """One run per start of the driver: MLflow assigns the ids, so a restarted driver cannot continue a run."""

    def __init__(self, experiment: str, job: RLJob) -> None:
        self._mlflow = _import_client("mlflow", "mlflowExperiment")
        self._mlflow.set_experiment(experiment)
        self._mlflow.start_run(run_name=job.metadata.name)

    def log(self, kind: str, step: int, numbers: dict[str, float]) -> None:
        self._mlflow.log_metrics({f"{kind}/{name}": value for name, value in numbers.items()}, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class Trackers:
    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)

    def log(self, kind: str, step: int, numbers: dict[str, float]) -> None:
        self._for_each(lambda tracker: tracker.log(kind, step, numbers))

    def restart_at(self, step: int) -> None:
        self._for_each(lambda tracker: tracker.restart_at(step) if isinstance(tracker, TensorBoard) else None)

    def close(self) -> None:
        self._for_each(lambda tracker: tracker.close())

    def _for_each(self, call: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                call(tracker)
            except Exception:  # a tracker's server may be down: no reason to lose a training run
                log.exception("%s failed and is disabled", type(tracker).__name__)
                self._trackers.remove(tracker)


def build_trackers(job: RLJob, run_dir: Path, prometheus: PrometheusMetrics) -> Trackers:
    """Return the trackers of spec.tracking. Raise UserError if one is not installed."""
    tracking = job.spec.tracking
    trackers: list[Tracker] = [prometheus]
    if tracking.tensorboard:
        trackers.append(TensorBoard(run_dir / "tensorboard"))
    if tracking.wandb_project:
        trackers.append(WeightsAndBiases(tracking.wandb_project, job))
    if tracking.mlflow_experiment:
        trackers.append(MlFlow(tracking.mlflow_experiment, job))
    return Trackers(trackers)
