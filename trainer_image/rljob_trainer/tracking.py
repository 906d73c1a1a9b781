"""Where metrics go besides metrics.jsonl: TensorBoard, Weights & Biases, MLflow, and Prometheus for scraping.

Each tracker takes the flat numbers of a step or evaluation. None may stop training: one that fails is logged and left
out from then on. Heavy clients are imported when a job asks for them.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rljob_api.errors import UserError
from rljob_api.job import RLJob

log = logging.getLogger(__name__)


class Tracker(Protocol):
    def log(self, kind: str, step: int, numbers: dict[str, float]) -> None:
        """Take the numbers of one step or evaluation (`kind`)."""
        ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files through tensorboard's own writer: torch's would import all of torch into the driver."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))

    def restart_at(self, step: int) -> None:
        """Tell TensorBoard that the history is cut: it drops what it read of later steps."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

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


class WeightsAndBiases:
    """One run a job; a resumed job goes on in it."""

    def __init__(self, project: str, job: RLJob) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                "spec.tracking.wandbProject is set, but wandb is not installed: rljob-trainer[wandb]"
            ) from error
        name = f"{job.metadata.namespace}-{job.metadata.name}"
        run_id = job.metadata.uid or name
        self._run: Any = wandb.init(
            project=project, name=job.metadata.name, id=run_id, resume="allow", config=job.to_manifest()["spec"]
        )

    def log(self, kind: str, step: int, numbers: dict[str, float]) -> None:
        self._run.log({f"{kind}/{name}": value for name, value in numbers.items()} | {"step": step})

    def close(self) -> None:
        self._run.finish()


class MlFlow:
    """One run a job."""

    def __init__(self, experiment: str, job: RLJob) -> None:
        try:
            import mlflow
        except ImportError as error:
            raise UserError(
                "spec.tracking.mlflowExperiment is set, but mlflow is not installed: rljob-trainer[mlflow]"
            ) from error
        self._mlflow: Any = mlflow
        mlflow.set_experiment(experiment)
        mlflow.start_run(run_name=job.metadata.name)

    def log(self, kind: str, step: int, numbers: dict[str, float]) -> None:
        self._mlflow.log_metrics({f"{kind}/{name}": value for name, value in numbers.items()}, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class Prometheus:
    """The driver's /metrics. Gauges hold the last step's numbers; what accumulates is a counter or a histogram."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._latency = Histogram(
            "rljob_reward_latency_seconds",
            "From a trajectory's end to its last reward, retries included",
            ["lane"],
            registry=self.registry,
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300),
        )
        self._invalid = Counter("rljob_reward_invalid", "Invalid results", ["reason"], registry=self.registry)
        self._samples = Counter("rljob_samples", "Samples scored", ["lane"], registry=self.registry)
        self._tokens = Counter("rljob_sampled_tokens", "Tokens sampled", ["lane"], registry=self.registry)
        self._mismatches = Counter(
            "rljob_weight_mismatches", "Rollouts that served weights with a wrong digest", registry=self.registry
        )
        self._restarts = Counter("rljob_restarts", "Restarts by the driver", ["role"], registry=self.registry)

    def record_collection(
        self, lane: str, latencies: Iterable[float], num_tokens: int, invalid: dict[str, int]
    ) -> None:
        for seconds in latencies:
            self._latency.labels(lane).observe(seconds)
            self._samples.labels(lane).inc()
        self._tokens.labels(lane).inc(num_tokens)
        for reason, count in invalid.items():
            self._invalid.labels(reason).inc(count)

    def record_mismatch(self) -> None:
        self._mismatches.inc()

    def record_restart(self, role: str) -> None:
        self._restarts.labels(role).inc()

    def log(self, kind: str, step: int, numbers: dict[str, float]) -> None:
        for name, value in {**numbers, "number": step}.items():
            metric = f"rljob_{kind}_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}"
            if metric not in self._gauges:
                self._gauges[metric] = Gauge(metric, f"{name} of the last {kind}", registry=self.registry)
            self._gauges[metric].set(value)

    def close(self) -> None:
        """Nothing to end: scrapers come to us."""

    def render(self) -> bytes:
        return generate_latest(self.registry)


class Trackers:
    """All trackers of a job."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)

    def log(self, kind: str, step: int, numbers: dict[str, float]) -> None:
        for tracker in list(self._trackers):
            try:
                tracker.log(kind, step, numbers)
            except Exception:  # somebody's server is down: not a reason to lose a training run
                log.exception("%s failed and is left out from now on", type(tracker).__name__)
                self._trackers.remove(tracker)

    def restart_at(self, step: int) -> None:
        for tracker in self._trackers:
            if isinstance(tracker, TensorBoard):
                tracker.restart_at(step)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def build_trackers(job: RLJob, run_dir: Path, prometheus: Prometheus) -> Trackers:
    """The trackers that spec.tracking asks for. Raises UserError for one that is not installed."""
    tracking = job.spec.tracking
    trackers: list[Tracker] = [prometheus]
    if tracking.tensorboard:
        trackers.append(TensorBoard(run_dir / "tensorboard"))
    if tracking.wandb_project:
        trackers.append(WeightsAndBiases(tracking.wandb_project, job))
    if tracking.mlflow_experiment:
        trackers.append(MlFlow(tracking.mlflow_experiment, job))
    return Trackers(trackers)
