"""What the driver gives to trackers, which trackers a job has, and how each receives it: TensorBoard, Weights & Biases,
MLflow, trackio, and one of the user.

`delivery` sends: it calls a tracker always in one thread, so that it may wait. Invariants: a tracker never stops or
delays training, and what it loses is counted and shown; a run keeps its id in a tracker for as long as its folder
exists, so a restart continues it. What trackers missed is named in the folder, and `rljob report --send` starts this
module, which sends it.
"""

import asyncio
import importlib
import json
import logging
import os
import posixpath
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from pydantic import TypeAdapter

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_api.read.pod_files import load_job_file
from rljob_api.run.folder import FILE_JOB, FILE_METRICS
from rljob_api.run.gauges import flatten, name_series
from rljob_api.run.metrics import AnyRecord, read_metrics
from rljob_api.run.summaries import DeliveryCounts
from rljob_api.wire.redaction import Redactor, find_values, redact_job
from rljob_inputs.machine.installation import describe_tracker, has_module
from rljob_trainer.episodes.types import Group
from rljob_trainer.history.delivery import Delivery, RefusedError, UnsentError
from rljob_trainer.history.trajectory_log import to_text
from rljob_trainer.run_folder.client import read_run_id

log = logging.getLogger(__name__)

W_AND_B_FINISH_SECONDS = 15.0
"""For the upload at the end. What is left is on the disk, for `wandb sync`."""
_MLFLOW_MAX_BATCH = 1000
_MLFLOW_MAX_NAME = 250
_MLFLOW_MAX_PARAMETERS = 100
_MLFLOW_RUN_TAG = "rljob.run-id"
_RETRYABLE = (401, 403, 408, 429)
"""Status codes below 500 which a later attempt may not have: someone corrects a token, or a limit ends."""

SAMPLE_COLUMNS = ("step", "group", "prompt", "answer", "completion", "score", "advantage", "end")


@dataclass(frozen=True)
class TrackedRecord:
    """What the trackers get of a step, an evaluation or a checkpoint."""

    kind: str
    """Prefix of the names: step, eval, eval/SET, checkpoint."""
    step: int
    numbers: Mapping[str, float]
    time: float = field(default_factory=time.time)
    """In seconds since 1970. A record may be sent hours later."""
    samples: Sequence[tuple[Any, ...]] = ()
    """Rows of SAMPLE_COLUMNS."""

    @property
    def named(self) -> dict[str, float]:
        return {f"{self.kind}/{name}": value for name, value in self.numbers.items()}


class Tracker(Protocol):
    def log(self, record: TrackedRecord) -> None: ...
    def restart_at(self, step: int) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files through tensorboard's own writer. torch's writer would import all of torch into the driver."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))

    def restart_at(self, step: int) -> None:
        """Drop the curves after `step`, which the run repeats."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        step += step > 0  # TensorBoard also drops the step in the event, which is done unless it is 0
        self._writer.add_event(Event(wall_time=time.time(), step=step, file_version="brain.Event:2"))
        self._writer.add_event(Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START)))

    def log(self, record: TrackedRecord) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in record.named.items()]
        self._writer.add_event(Event(wall_time=record.time, step=record.step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class ClientRun:
    """The run of a client with `log(values, step)` and `finish()`."""

    def __init__(self, run: Any, table: Callable[..., Any] | None = None) -> None:
        """`table`: the client's type for the table of samples."""
        self._run, self._table, self.url = run, table, getattr(run, "url", None)

    def restart_at(self, step: int) -> None:
        """Do nothing: such clients cannot drop steps. A repeated step has two points."""

    def log(self, record: TrackedRecord) -> None:
        values: dict[str, Any] = dict(record.named)
        if record.samples and self._table:
            table = self._table(columns=list(SAMPLE_COLUMNS), data=[list(row) for row in record.samples])
            values[f"{record.kind}/samples"] = table
        self._send(values, record.step)

    def _send(self, values: dict[str, Any], step: int) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


class WeightsAndBiases(ClientRun):
    """One run for each folder of a run. `step` is the axis of all curves: W&B's own counts the calls of log()."""

    def __init__(self, job: RLJob, run_dir: Path, run_id: str) -> None:
        import wandb

        tracking = job.spec.tracking
        run = wandb.init(
            project=tracking.wandb_project,
            entity=tracking.wandb_entity,
            group=tracking.wandb_group,
            tags=tracking.wandb_tags or None,
            name=job.metadata.name,
            id=run_id,
            resume="allow",
            reinit="finish_previous",
            dir=str(run_dir),
            config=redact_job(job.to_manifest())["spec"],
            # The console has the lines of all roles, which `rljob logs` shows.
            settings=wandb.Settings(console="off", finish_timeout=W_AND_B_FINISH_SECONDS, finish_timeout_raises=True),
        )
        super().__init__(run, wandb.Table)
        if run.offline:
            self.url = ""
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")

    def _send(self, values: dict[str, Any], step: int) -> None:
        self._run.log(values | {"step": step})

    def close(self) -> None:
        try:
            super().close()
        except TimeoutError as error:  # its client takes records without a server, and sends them later
            raise UnsentError(str(error)) from error


class Trackio(ClientRun):
    """One run for each folder of a run, found again by its name. Without a server, it is in that folder."""

    def __init__(self, job: RLJob, run_dir: Path, run_id: str) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(run_dir / "trackio"))
        import trackio

        self._project, name = job.spec.tracking.trackio_project or "", f"{job.metadata.name}-{run_id[:8]}"
        config = redact_job(job.to_manifest())["spec"]
        run = trackio.init(project=self._project, name=name, resume="allow", config=config, embed=False)
        super().__init__(run, trackio.Table)

    def close(self) -> None:
        from trackio.sqlite_storage import SQLiteStorage

        super().close()
        if SQLiteStorage.has_pending_data(self._project):
            raise UnsentError(f"{os.environ['TRACKIO_DIR']} has what its server did not take")


class MlFlow:
    """One run for each folder of a run, found again by a tag, since MLflow assigns the ids."""

    def __init__(self, job: RLJob, run_id: str) -> None:
        # Its own retries take minutes for each call; `delivery` retries for hours.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient()
        name = job.spec.tracking.mlflow_experiment or ""
        known = self._client.get_experiment_by_name(name)
        experiment = str(known.experiment_id if known else self._client.create_experiment(name))
        found = self._client.search_runs([experiment], f"tags.`{_MLFLOW_RUN_TAG}` = '{run_id}'", max_results=1)
        if found:
            self._run = found[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
        else:  # the parameters of a run cannot change
            tags = {_MLFLOW_RUN_TAG: run_id}
            self._run = self._client.create_run(experiment, run_name=job.metadata.name, tags=tags).info.run_id
            settings = _flatten_settings(redact_job(job.to_manifest(exclude_defaults=True))["spec"])
            parameters = [Param(mlflow_name(name), str(value)) for name, value in settings[:_MLFLOW_MAX_PARAMETERS]]
            self._client.log_batch(self._run, params=parameters)

    def restart_at(self, step: int) -> None:
        """Do nothing: MLflow cannot drop steps. A repeated step has two points."""

    def log(self, record: TrackedRecord) -> None:
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException

        at = int(record.time * 1000)
        metrics = [Metric(mlflow_name(name), value, at, record.step) for name, value in record.named.items()]
        try:
            for start in range(0, len(metrics), _MLFLOW_MAX_BATCH):
                self._client.log_batch(self._run, metrics=metrics[start : start + _MLFLOW_MAX_BATCH])
        except MlflowException as error:
            status = error.get_http_status_code()
            if 400 <= status < 500 and status not in _RETRYABLE:
                raise RefusedError(str(error)) from error
            raise

    def close(self) -> None:
        self._client.set_terminated(self._run)


def mlflow_name(name: str) -> str:
    """Return a name that MLflow accepts. It refuses the whole record for the name of one component, such as acc@1."""
    allowed = re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)
    return posixpath.normpath(allowed).lstrip("/.")[:_MLFLOW_MAX_NAME] or "_"


def _flatten_settings(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Return the fields of a spec by their path."""
    if isinstance(value, Mapping):
        entries = value.items()
    elif isinstance(value, list) and any(isinstance(each, Mapping | list) for each in value):
        entries = {str(index): each for index, each in enumerate(value)}.items()
    else:
        return [(prefix, value)]
    return [found for name, each in entries for found in _flatten_settings(each, f"{prefix}.{name}".lstrip("."))]


CLOSE_SECONDS = 20.0
"""At the end of the run, to send what waits and to close all clients. With the time of a checkpoint, it fits into the
grace period of the head's Pod."""
_MAX_CHARACTERS = 10_000
"""Limit of a text in the table of samples."""


class Trackers:
    """All trackers of a job."""

    def __init__(
        self,
        deliveries: Sequence[Delivery] = (),
        redactor: Redactor | None = None,
        *,
        num_samples: int = 0,
        run_dir: Path | None = None,
    ) -> None:
        """`num_samples`: of each step and evaluation, for the table of samples. `redactor`: hides the job's secrets.
        `run_dir`: keeps the names of records that a tracker missed. None: nothing does."""
        self._deliveries, self._num_samples, self._run_dir = deliveries, num_samples, run_dir
        self._redactor = redactor or Redactor()

    def log(self, record: AnyRecord, groups: Sequence[Group] = ()) -> None:
        samples = describe_samples(record.step, groups, self._num_samples) if self._deliveries else []
        tracked = TrackedRecord(
            name_series(record), record.step, flatten(record), samples=self._redactor.redact(samples)
        )
        self._submit(lambda tracker: tracker.log(tracked), name_record(record))

    def restart_at(self, step: int) -> None:
        self._submit(lambda tracker: tracker.restart_at(step))

    def counts(self) -> dict[str, DeliveryCounts]:
        return {delivery.name: delivery.counts() for delivery in self._deliveries}

    async def close(self, seconds: float = CLOSE_SECONDS) -> dict[str, DeliveryCounts]:
        """Send what waits, close the clients, and return the counts of each tracker."""
        ends_at = time.monotonic() + seconds
        await asyncio.gather(*(asyncio.to_thread(delivery.close, ends_at) for delivery in self._deliveries))
        missed = {each.name: found for each in self._deliveries if (found := [*filter(None, each.missed)])}
        if self._run_dir is not None and missed:
            known = _read_missed(self._run_dir) or {}
            added = {name: list(dict.fromkeys(known.get(name, []) + keys)) for name, keys in missed.items()}
            _write_missed(self._run_dir, known | added)
        return self.counts()

    def _submit(self, send: Callable[[Tracker], None], key: str = "") -> None:
        for delivery in self._deliveries:
            delivery.submit(send, key)


_FILE_MISSED = "missed-records.json"


def name_record(record: AnyRecord) -> str:
    return f"{name_series(record)} {record.step}"


def _read_missed(run_dir: Path) -> dict[str, list[str]] | None:
    """Return the names of the records that each tracker missed; None if the file is damaged."""
    try:
        return TypeAdapter(dict[str, list[str]]).validate_json((run_dir / _FILE_MISSED).read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        return None


def _write_missed(run_dir: Path, missed: Mapping[str, Sequence[str]]) -> None:
    try:
        (run_dir / _FILE_MISSED).write_text(json.dumps(missed) + "\n")
    except OSError as error:
        log.warning("what trackers missed cannot be kept: %s", error)


def send_missed(run_dir: Path) -> Iterator[str]:
    """Send what the trackers of a run missed, from its metrics.jsonl. Yield what was done with each tracker."""
    job = load_job_file(run_dir / FILE_JOB)
    records = {name_record(each): each for each in read_metrics(run_dir / FILE_METRICS).records}
    missed, connects = _read_missed(run_dir), find_trackers(job, run_dir)
    if not missed:
        yield "trackers missed nothing" if missed == {} else f"{run_dir / _FILE_MISSED} is damaged; nothing is sent"
        return
    for name, keys in list(missed.items()):
        found = [records[key] for key in dict.fromkeys(keys) if key in records]
        try:
            tracker = connects[name]()
            for each in found:
                numbers = flatten(each)
                tracker.log(TrackedRecord(name_series(each), each.step, numbers, time=each.time or time.time()))
            tracker.close()
        except Exception as error:  # unknown errors of libraries, as in `delivery`
            yield f"{name}: {len(found)} records wait on: {type(error).__name__}: {error}"
            continue
        del missed[name]
        _write_missed(run_dir, missed)
        yield f"{name}: {len(found)} records were sent"


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
    tracking = job.spec.tracking
    for package, field_name in tracking.packages.items():
        if not has_module(package):
            raise UserError(f"spec.tracking.{field_name} {describe_tracker(package)}, or use RLJob's own image")
    if tracking.custom:
        try:
            _import(tracking.custom)
        except Exception as error:
            problem = f"cannot be imported: {type(error).__name__}: {error}"
            raise UserError(f"spec.tracking.custom {tracking.custom} {problem}") from error
    if tracking.mlflow_experiment and not os.environ.get("MLFLOW_TRACKING_URI"):
        raise UserError(
            "spec.tracking.mlflowExperiment is set, but MLFLOW_TRACKING_URI is not; set it in spec.head.env"
        )
    deliveries = [Delivery(name, connect) for name, connect in find_trackers(job, run_dir).items()]
    redactor = Redactor(find_values(job.to_manifest()))
    num_samples = tracking.wandb_samples if tracking.wandb_project or tracking.trackio_project else 0
    return Trackers(deliveries, redactor, num_samples=num_samples, run_dir=run_dir)


def find_trackers(job: RLJob, run_dir: Path) -> dict[str, Callable[[], Tracker]]:
    """Return what connects to each tracker of spec.tracking."""
    tracking, run_id = job.spec.tracking, read_run_id(run_dir)
    found: dict[str, Callable[[], Tracker]] = {}
    if tracking.tensorboard:
        found["tensorboard"] = partial(TensorBoard, run_dir / "tensorboard")
    if tracking.wandb_project:
        found["wandb"] = partial(WeightsAndBiases, job, run_dir, run_id)
    if tracking.mlflow_experiment:
        found["mlflow"] = partial(MlFlow, job, run_id)
    if tracking.trackio_project:
        found["trackio"] = partial(Trackio, job, run_dir, run_id)
    if tracking.custom:
        found["custom"] = partial(_start_custom, tracking.custom, job, run_id)
    return found


def _start_custom(reference: str, job: RLJob, run_id: str) -> ClientRun:
    config = redact_job(job.to_manifest())["spec"]
    return ClientRun(_import(reference)(name=job.metadata.name, run_id=run_id, config=config))


@cache
def _import(reference: str) -> Callable[..., Any]:
    """Return what spec.tracking.custom names."""
    source, _, name = reference.rpartition(":")
    if not source.endswith(".py"):
        return getattr(importlib.import_module(source), name)
    # Its folder stays off sys.path: it may have json.py.
    loader = SourceFileLoader("rljob_custom_tracker", source)
    module = sys.modules[loader.name] = ModuleType(loader.name)
    loader.exec_module(module)
    return getattr(module, name)


if __name__ == "__main__":
    for line in send_missed(Path(sys.argv[1])):
        print(line, flush=True)
