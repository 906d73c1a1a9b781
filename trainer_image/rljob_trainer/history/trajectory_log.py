"""The trajectory log: every sample of a step or an evaluation with all of its scores, one Parquet file a step and lane.

Owns the columns, the bound on the log's size, and that writing costs the event loop nothing. Leaves to `state` where
the files are and which of them a restart keeps. Invariants: a file is there as a whole or not at all; a step that is
done again replaces its file; an invalid result has a reason and no score; what is unknown is null.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rljob_api.wire.protocol import Lane, ScoreResult
from rljob_trainer.episodes.batches import Group
from rljob_trainer.episodes.prompts import Prompt
from rljob_trainer.episodes.types import Scored, Trajectory
from rljob_trainer.history.run_state import disk_errors, list_trajectory_files, put_in_place, trajectory_file

log = logging.getLogger(__name__)

FORMAT = "1"
"""In each file's metadata; changes when a column changes its meaning or goes."""
_ROWS_A_BATCH = 128
"""Converted at once: pyarrow holds the interpreter's lock meanwhile, and the event loop waits for it."""

_REWARD = pa.struct(
    [
        ("name", pa.string()),
        ("valid", pa.bool_()),
        ("score", pa.float64()),
        ("components", pa.map_(pa.string(), pa.float64())),  # a map: each result may have keys of its own
        ("reason", pa.string()),
        ("message", pa.string()),
        ("version", pa.string()),
        ("attempts", pa.int32()),
        ("queue_seconds", pa.float64()),
        ("execute_seconds", pa.float64()),
        ("latency_seconds", pa.float64()),
    ]
)
SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("lane", pa.string()),
        ("group", pa.int32()),
        ("sample", pa.int32()),
        ("prompt_index", pa.int64()),
        ("data_source", pa.string()),
        ("prompt", pa.string()),
        ("ground_truth", pa.string()),
        ("completion", pa.string()),
        ("truncated", pa.bool_()),
        ("num_tokens", pa.int32()),
        ("num_sampled_tokens", pa.int32()),
        ("weights", pa.string()),
        ("score", pa.float64()),
        ("advantage", pa.float64()),
        ("rewards", pa.list_(_REWARD)),
    ],
    metadata={"rljob.trajectories": FORMAT},
)


class TrajectoryLog:
    """Takes samples at once and writes them in a thread of its own, in order."""

    def __init__(self, run_dir: Path, max_mib: int) -> None:
        self._run_dir = run_dir
        self._max_bytes = max_mib << 20
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trajectory-log")
        self._pending: list[Future[None]] = []

    def record(self, lane: Lane, step: int, groups: Sequence[Group]) -> None:
        """Have `groups` written; they must not change any more."""
        if self._max_bytes and groups:
            self._pending.append(self._thread.submit(self._write, lane, step, list(groups)))

    async def flush(self) -> None:
        """Wait until all that was recorded is on disk. Raises UserError when it is full."""
        # Who is cancelled here leaves all of it to the next one: the checkpoint before the end counts it as well.
        pending = list(self._pending)
        await asyncio.shield(asyncio.gather(*map(asyncio.wrap_future, pending)))
        del self._pending[: len(pending)]

    async def close(self) -> None:
        """Nothing is written any more once this returns."""
        await asyncio.to_thread(self._thread.shutdown)

    def _write(self, lane: Lane, step: int, groups: list[Group]) -> None:
        path = trajectory_file(self._run_dir, step, lane)
        with disk_errors(path):
            try:
                write_file(path, lane, step, groups)
            except (pa.ArrowException, TypeError, ValueError, OverflowError):
                # Samples that no file can hold are our mistake, and no reason to lose a training run.
                log.exception("%s could not be written: this step is missing in the trajectory log", path)
            self._remove_oldest(path)

    def _remove_oldest(self, newest: Path) -> None:
        """Keep within the bound. The newest file stays, however large."""
        sizes = {file.path: file.path.stat().st_size for file in list_trajectory_files(self._run_dir)}
        total = sum(sizes.values())
        for path, num_bytes in sizes.items():
            if total > self._max_bytes and path != newest:
                path.unlink()
                total -= num_bytes


def write_file(path: Path, lane: Lane, step: int, groups: Sequence[Group]) -> None:
    """Write one step's samples, in the order of the data, so that the file is there as a whole or not at all."""
    rows = (describe_sample(lane, step, group.prompt, t) for group in groups for t in group.trajectories)
    table = pa.Table.from_batches(_convert(rows), schema=SCHEMA)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    pq.write_table(table, temporary, compression="zstd")
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    put_in_place(temporary, path)


def _convert(rows: Iterator[dict[str, Any]]) -> Iterator[pa.RecordBatch]:
    while some := list(islice(rows, _ROWS_A_BATCH)):
        yield pa.RecordBatch.from_pylist(some, schema=SCHEMA)


def describe_sample(lane: Lane, step: int, prompt: Prompt, trajectory: Trajectory) -> dict[str, Any]:
    """One row."""
    return {
        "step": step,
        "lane": lane,
        "group": trajectory.group,
        "sample": trajectory.sample,
        "prompt_index": trajectory.prompt_index,
        "data_source": _text(prompt.data_source),
        "prompt": _text(prompt.prompt),
        "ground_truth": None if prompt.ground_truth is None else _text(prompt.ground_truth),
        "completion": _text(trajectory.text),
        "truncated": trajectory.truncated,
        "num_tokens": len(trajectory.token_ids),
        "num_sampled_tokens": trajectory.num_sampled,
        "weights": trajectory.weight_key,
        "score": trajectory.score,
        "advantage": trajectory.advantage,
        "rewards": [_describe_result(name, result) for name, result in trajectory.results.items()],
    }


def _describe_result(name: str, result: ScoreResult) -> dict[str, Any]:
    return {
        "name": name,
        "valid": result.valid,
        "score": result.score,
        "components": [(_text(key), value) for key, value in result.components.items()],
        "reason": None if result.reason is None else str(result.reason),
        "message": _text(result.message),
        "version": _text(result.version),
        "attempts": result.attempts if isinstance(result, Scored) else None,
        "queue_seconds": result.queue_seconds,
        "execute_seconds": result.execute_seconds,
        "latency_seconds": result.latency_seconds if isinstance(result, Scored) else None,
    }


def _text(value: Any) -> str:
    """A string as it is, anything else as JSON; halves of surrogate pairs, which no file can hold, become '?'."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text.encode("utf-8", "replace").decode()
