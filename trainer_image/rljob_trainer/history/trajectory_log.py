"""The trajectory log: every sample with all of its scores, in one Parquet file per step and lane.

Invariants: a file is complete or does not exist; a repeated step replaces its file; an invalid result has a reason and
no score; an unknown value is null.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rljob_api.wire.protocol import Lane, ScoreResult
from rljob_inputs.prompts import Prompt
from rljob_trainer.episodes.types import Episode, Group, ScoredResult
from rljob_trainer.history.run_state import disk_errors, list_trajectory_files, rename_durably, trajectory_file

log = logging.getLogger(__name__)

FORMAT = "1"
"""In each file's metadata. Change it when a column is removed or changes its meaning."""
_ROWS_PER_BATCH = 128
"""Rows to convert at once: pyarrow holds the GIL meanwhile, and the event loop waits."""

_REWARD = pa.struct(
    [
        ("name", pa.string()),
        ("valid", pa.bool_()),
        ("score", pa.float64()),
        ("components", pa.map_(pa.string(), pa.float64())),  # a map: the keys differ between results
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
    """Accepts samples immediately, and writes them in order in a separate thread."""

    def __init__(self, run_dir: Path, max_mib: int) -> None:
        self._run_dir = run_dir
        self._max_bytes = max_mib << 20
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trajectory-log")
        self._pending: list[Future[None]] = []

    def record(self, lane: Lane, step: int, groups: Sequence[Group]) -> None:
        """Schedule the writing of `groups`, which must not change afterwards."""
        if self._max_bytes and groups:
            self._pending.append(self._thread.submit(self._write, lane, step, list(groups)))

    async def flush(self) -> None:
        """Wait until everything recorded is on the disk. Raise UserError if the disk is full."""
        # A cancelled call leaves all of it to the next one: the checkpoint before exit counts it as well.
        pending = list(self._pending)
        await asyncio.shield(asyncio.gather(*map(asyncio.wrap_future, pending)))
        del self._pending[: len(pending)]

    async def close(self) -> None:
        """Wait for the writes. Nothing is written after this returns."""
        await asyncio.to_thread(self._thread.shutdown)

    def _write(self, lane: Lane, step: int, groups: list[Group]) -> None:
        path = trajectory_file(self._run_dir, step, lane)
        with disk_errors(path):
            try:
                write_file(path, lane, step, groups)
            except (pa.ArrowException, TypeError, ValueError, OverflowError):
                # Samples that do not fit the schema are a bug here, and no reason to lose a training run.
                log.exception("cannot write %s: this step is missing in the trajectory log", path)
            self._remove_oldest(path)

    def _remove_oldest(self, newest: Path) -> None:
        """Delete the oldest files until the log is within its limit. The newest file stays, however large."""
        sizes = {file.path: file.path.stat().st_size for file in list_trajectory_files(self._run_dir)}
        total = sum(sizes.values())
        for path, num_bytes in sizes.items():
            if total > self._max_bytes and path != newest:
                path.unlink()
                total -= num_bytes


def write_file(path: Path, lane: Lane, step: int, groups: Sequence[Group]) -> None:
    """Write one step's samples atomically, in the order of the data."""
    rows = (describe_sample(lane, step, group.prompt, e) for group in groups for e in group.episodes)
    table = pa.Table.from_batches(_convert(rows), schema=SCHEMA)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    pq.write_table(table, temporary, compression="zstd")
    rename_durably(temporary, path)


def _convert(rows: Iterator[dict[str, Any]]) -> Iterator[pa.RecordBatch]:
    while some := list(islice(rows, _ROWS_PER_BATCH)):
        yield pa.RecordBatch.from_pylist(some, schema=SCHEMA)


def describe_sample(lane: Lane, step: int, prompt: Prompt, episode: Episode) -> dict[str, Any]:
    return {
        "step": step,
        "lane": lane,
        "group": episode.group,
        "sample": episode.sample,
        "prompt_index": episode.prompt_index,
        "data_source": _text(prompt.data_source),
        "prompt": _text(prompt.prompt),
        "ground_truth": None if prompt.ground_truth is None else _text(prompt.ground_truth),
        "completion": _text(episode.text),
        "truncated": episode.truncated,
        "num_tokens": episode.num_tokens,
        "num_sampled_tokens": episode.num_sampled,
        "weights": _weights(episode),
        "score": episode.score,
        "advantage": episode.advantage,
        "rewards": [_describe_result(name, result) for name, result in episode.results.items()],
    }


def _weights(episode: Episode) -> str:
    """Return GENERATION:VERSION of the oldest weights that sampled the episode."""
    return f"{episode.generation}:{episode.versions[0]}"


def _describe_result(name: str, result: ScoreResult) -> dict[str, Any]:
    return {
        "name": name,
        "valid": result.valid,
        "score": result.score,
        "components": [(_text(key), value) for key, value in result.components.items()],
        "reason": None if result.reason is None else str(result.reason),
        "message": _text(result.message),
        "version": _text(result.version),
        "attempts": result.attempts if isinstance(result, ScoredResult) else None,
        "queue_seconds": result.queue_seconds,
        "execute_seconds": result.execute_seconds,
        "latency_seconds": result.latency_seconds if isinstance(result, ScoredResult) else None,
    }


def _text(value: Any) -> str:
    """Return a string unchanged, and anything else as JSON. Lone surrogates, which UTF-8 cannot encode, become '?'."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text.encode("utf-8", "replace").decode()
