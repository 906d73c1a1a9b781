"""The trajectory log: every sample with all of its scores, in one Parquet file per step and lane.

`rljob_api.run.trajectories` has the columns. Invariants: a file is complete or does not exist; a repeated step replaces
its file; an invalid result has a reason and no score; an unknown value is null.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, get_args, get_origin

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic.fields import FieldInfo

from rljob_api.run.base import Record, find_part
from rljob_api.run.folder import TRAJECTORIES, list_trajectory_files, trajectory_file
from rljob_api.run.trajectories import (
    FORMAT,
    FORMAT_KEY,
    Int64,
    ResultRow,
    SampleRow,
    SegmentRow,
    SpanRow,
    ToolCallRow,
    TurnRow,
)
from rljob_api.wire.protocol import Lane, ScoreResult
from rljob_inputs.prompts import Prompt
from rljob_trainer.episodes.types import ContextBreak, Episode, Group, ScoredResult, Segment, ToolCall, Turn, failed_as
from rljob_trainer.history.disk import RunDisk, disk_errors
from rljob_trainer.history.durable import rename_durably

log = logging.getLogger(__name__)

_ROWS_PER_BATCH = 16
"""Rows to convert at once: pyarrow holds the GIL meanwhile, and the event loop waits."""
_SCALARS = {bool: pa.bool_(), int: pa.int32(), float: pa.float64(), str: pa.string()}


def _build_columns(kind: type[Record]) -> list[tuple[str, pa.DataType]]:
    """Return the columns of a type. A map is one, since its keys differ between results."""
    return [(name, _choose_type(field)) for name, field in kind.model_fields.items()]


def _choose_type(field: FieldInfo) -> pa.DataType:
    if (part := find_part(field.annotation)) is not None:
        return pa.list_(pa.struct(_build_columns(part)))
    if get_origin(field.annotation) is dict:
        return pa.map_(pa.string(), pa.float64())
    [scalar] = {field.annotation, *get_args(field.annotation)} & _SCALARS.keys()
    return pa.int64() if Int64 in field.metadata else _SCALARS[scalar]


SCHEMA = pa.schema(_build_columns(SampleRow), metadata={FORMAT_KEY: FORMAT})


Decode = Callable[[list[int]], str]
"""Token ids to text, with special tokens."""


class _Write:
    """One file that is written in the log's thread, again if the last attempt has failed."""

    def __init__(self, path: Path, submit: Callable[[], Future[None]]) -> None:
        self.path, self._submit = path, submit
        self._attempt = submit()

    async def finish(self) -> None:
        if self._attempt.done() and not self._attempt.cancelled() and self._attempt.exception() is not None:
            failed, self._attempt = self._attempt, self._submit()
            log.info("%s is written again, after %s", self.path, failed.exception())
        # A cancelled call leaves it to the next one: the checkpoint before exit counts it as well.
        await asyncio.shield(asyncio.wrap_future(self._attempt))


class TrajectoryLog:
    """Accepts samples immediately, and writes them in order in a separate thread."""

    def __init__(
        self, run_dir: Path, max_bytes: int, decode: Decode | None = None, disk: RunDisk | None = None
    ) -> None:
        """`decode`: None, if no sample is a conversation."""
        self._run_dir, self._decode, self._disk = run_dir, decode, disk or RunDisk(run_dir)
        self._max_bytes = max_bytes
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trajectory-log")
        self._pending: list[_Write] = []

    def record(self, lane: Lane, step: int, groups: Sequence[Group]) -> None:
        """Schedule the writing of `groups`, which must not change afterwards."""
        if self._max_bytes and groups:
            write = partial(self._thread.submit, self._write, lane, step, list(groups))
            self._pending.append(_Write(trajectory_file(self._run_dir, step, lane), write))

    async def flush(self) -> None:
        """Wait until everything recorded is on the disk. Raise OutageError if that has no room for too long."""
        while self._pending:
            first = self._pending[0]
            await self._disk.run(first.path, first.finish)
            if self._pending and self._pending[0] is first:  # else another call has waited for it, too
                del self._pending[0]

    async def close(self) -> None:
        """Wait for the writes. Nothing is written after this returns."""
        await asyncio.to_thread(self._thread.shutdown)

    def _write(self, lane: Lane, step: int, groups: list[Group]) -> None:
        path = trajectory_file(self._run_dir, step, lane)
        with disk_errors(path):
            try:
                write_file(path, lane, step, groups, self._decode)
            except (pa.ArrowException, TypeError, ValueError, OverflowError):
                # Samples that do not fit the schema are a bug here, and no reason to lose a training run.
                log.exception("cannot write %s: this step is missing in the trajectory log", path)
            self._remove_oldest(path)

    def _remove_oldest(self, newest: Path) -> None:
        """Delete the oldest files until the log is within its limit. The newest file stays, however large."""
        sizes = {file.path: file.path.stat().st_size for file in list_trajectory_files(self._run_dir / TRAJECTORIES)}
        total = sum(sizes.values())
        for path, num_bytes in sizes.items():
            if total > self._max_bytes and path != newest:
                path.unlink()
                total -= num_bytes


def write_file(path: Path, lane: Lane, step: int, groups: Sequence[Group], decode: Decode | None = None) -> None:
    """Write one step's samples atomically, in the order of the data."""
    rows = (describe_sample(lane, step, group.prompt, e, decode) for group in groups for e in group.episodes)
    table = pa.Table.from_batches(_convert(rows), schema=SCHEMA)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    pq.write_table(table, temporary, compression="zstd")
    rename_durably(temporary, path)


def _convert(rows: Iterator[SampleRow]) -> Iterator[pa.RecordBatch]:
    while some := [row.model_dump() for row in islice(rows, _ROWS_PER_BATCH)]:
        yield pa.RecordBatch.from_pylist(some, schema=SCHEMA)


def describe_sample(lane: Lane, step: int, prompt: Prompt, episode: Episode, decode: Decode | None = None) -> SampleRow:
    breaks = [None, *episode.breaks]
    segments = [_describe_segment(*pair, decode) for pair in zip(episode.segments, breaks, strict=True)]
    is_conversation = bool(episode.messages)
    return SampleRow(
        step=step,
        lane=lane,
        group=episode.group,
        sample=episode.sample,
        seat=episode.seat or None,
        trajectory=episode.trajectory,
        prompt_index=episode.prompt_index,
        data_source=_text(prompt.data_source),
        prompt=_text(prompt.prompt),
        ground_truth=None if prompt.ground_truth is None else _text(prompt.ground_truth),
        completion=_text(episode.text),
        truncated=episode.truncated,
        num_tokens=episode.num_tokens,
        num_sampled_tokens=episode.num_sampled,
        weights=f"{episode.generation}:{episode.versions[0]}",
        score=episode.score,
        advantage=episode.advantage,
        rewards=[_describe_result(name, result) for name, result in episode.results.items()],
        end=episode.end.value,
        failure=_text(str(episode.failure)) if episode.failure else None,
        messages=_text(episode.messages) if is_conversation else None,
        state=_text(episode.state) if is_conversation else None,
        own_reward=episode.own_reward,
        info=_text(episode.info) if episode.info else None,
        turns=[_describe_turn(turn) for turn in episode.turns] if is_conversation else None,
        segments=segments if is_conversation else None,
    )


def _describe_turn(turn: Turn) -> TurnRow:
    return TurnRow(
        text=_text(turn.text),
        reward=turn.reward,
        advantage=turn.advantage,
        truncated=turn.truncated,
        user_seconds=turn.user_seconds,
        user_info=_text(turn.user_info) if turn.user_info else None,
        tool_calls=[_describe_call(call) for call in turn.tool_calls],
    )


def _describe_call(call: ToolCall) -> ToolCallRow:
    return ToolCallRow(
        id=call.id,
        name=_text(call.name),
        tool=call.tool or None,
        arguments=None if call.arguments is None else _text(call.arguments),
        error=_text(call.error) if call.error else None,
        seconds=call.seconds,
    )


def _describe_segment(segment: Segment, reason: ContextBreak | None, decode: Decode | None) -> SegmentRow:
    spans = []
    for start, end in _find_spans(segment.turns):
        text = _text(decode(segment.token_ids[start:end].tolist())) if decode else None
        spans.append(SpanRow(start=start, end=end, turn=int(segment.turns[start]), text=text))
    return SegmentRow(
        num_tokens=len(segment.token_ids),
        cause=reason.cause if reason else None,
        difference=_text(reason.difference) if reason else None,
        spans=spans,
    )


def _find_spans(turns: NDArray[np.int32]) -> list[tuple[int, int]]:
    """Return where each run of tokens of one turn, or of none, begins and ends."""
    starts = np.flatnonzero(np.append(True, np.diff(turns) != 0))[: len(turns)].tolist()
    return list(pairwise([*starts, len(turns)]))


def _describe_result(name: str, result: ScoreResult) -> ResultRow:
    cause = result.reason or failed_as(result)
    return ResultRow(
        name=name,
        valid=result.valid,
        score=result.score,
        components={_text(key): value for key, value in result.components.items()},
        reason=None if cause is None else str(cause),
        message=_text(result.message),
        version=_text(result.version),
        attempts=result.attempts if isinstance(result, ScoredResult) else None,
        queue_seconds=result.queue_seconds,
        execute_seconds=result.execute_seconds,
        latency_seconds=result.latency_seconds if isinstance(result, ScoredResult) else None,
    )


def _text(value: Any) -> str:
    """Return a string unchanged, and anything else as JSON. Lone surrogates, which UTF-8 cannot encode, become '?'."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text.encode("utf-8", "replace").decode()
