"""The trajectory log: every sample with all of its scores, in one Parquet file per step and lane.

`rljob_api.run.trajectories` has the columns. Invariants: a file is complete or does not exist; a repeated step replaces
its file; an invalid result has a reason and no score; an unknown value is null.
"""

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
from numpy.typing import DTypeLike, NDArray
from pydantic.fields import FieldInfo

from rljob_api.run.base import Record, find_part
from rljob_api.run.folder import TRAJECTORIES, list_trajectory_files, trajectory_file
from rljob_api.run.trajectories import (
    FORMAT,
    FORMAT_KEY,
    Float32,
    Int64,
    RecordedRow,
    ResultRow,
    SampleRow,
    SegmentRow,
    SpanRow,
    ToolCallRow,
    TurnRow,
)
from rljob_api.wire.base import Lane
from rljob_trainer.episodes.types import ContextBreak, Episode, Group, ScoredResult, Segment, Turn
from rljob_trainer.history.disk import RunDisk, disk_errors, rename_durably

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
    kinds = (field.annotation, *get_args(field.annotation))
    if (items := next((get_args(kind) for kind in kinds if get_origin(kind) is list), None)) is not None:
        return pa.list_(_choose_scalar(items, field))
    return _choose_scalar(kinds, field)


def _choose_scalar(kinds: Sequence[Any], field: FieldInfo) -> pa.DataType:
    [scalar] = set(kinds) & _SCALARS.keys()
    marked = {Int64: pa.int64(), Float32: pa.float32()}
    return next((marked[mark] for mark in field.metadata if mark in marked), _SCALARS[scalar])


SCHEMA = pa.schema(_build_columns(RecordedRow), metadata={FORMAT_KEY: FORMAT})
_LOGPROBS = "logprobs.list.element"


def _list_leaves(name: str, kind: pa.DataType) -> Iterator[str]:
    """Yield the paths that Parquet has for the values of a column."""
    if pa.types.is_map(kind):
        yield from (f"{name}.key_value.key", f"{name}.key_value.value")
    elif pa.types.is_list(kind):
        yield from _list_leaves(f"{name}.list.element", kind.value_type)
    elif pa.types.is_struct(kind):
        for field in kind:
            yield from _list_leaves(f"{name}.{field.name}", field.type)
    else:
        yield name


_DICTIONARIES = [path for field in SCHEMA for path in _list_leaves(field.name, field.type) if path != _LOGPROBS]
"""Columns whose values repeat. Log-probs do not, and take 3.3 bytes instead of 5.8 if their bytes are split."""
_SAMPLE_SCHEMA = pa.schema(_build_columns(SampleRow))
_PLACE = ("update", "part", "position")


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
        self.max_bytes = max_bytes
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trajectory-log")
        self._pending: list[_Write] = []

    def record(self, lane: Lane, step: int, groups: Sequence[Group]) -> None:
        """Schedule the writing of `groups`, which must not change afterwards."""
        if self.max_bytes and groups:
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
            if total > self.max_bytes and path != newest:
                path.unlink()
                total -= num_bytes


def write_file(path: Path, lane: Lane, step: int, groups: Sequence[Group], decode: Decode | None = None) -> None:
    """Write one step's samples atomically, in the order of the data."""
    samples = (
        (_describe_sample(lane, step, group, episode, decode), group, episode)
        for group in groups
        for episode in group.episodes
    )
    table = pa.Table.from_batches(_convert(samples), schema=SCHEMA)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    pq.write_table(
        table, temporary, compression="zstd", use_dictionary=_DICTIONARIES, use_byte_stream_split=[_LOGPROBS]
    )
    rename_durably(temporary, path)


_Sample = tuple[SampleRow, Group, Episode]


def _convert(samples: Iterator[_Sample]) -> Iterator[pa.RecordBatch]:
    while some := list(islice(samples, _ROWS_PER_BATCH)):
        described = pa.RecordBatch.from_pylist([row.model_dump() for row, *_ in some], schema=_SAMPLE_SCHEMA)
        yield pa.RecordBatch.from_arrays([*described.columns, *_build_replay_columns(some)], schema=SCHEMA)


def _build_replay_columns(samples: Sequence[_Sample]) -> list[pa.Array]:
    """Return the columns that RecordedRow adds. Tokens are copied as arrays: as Python numbers they take 100 times as
    long, for which the event loop would wait."""
    trained = [group.trained_as if row.lane == "train" else None for row, group, _ in samples]
    places = [pa.array([None if t is None else getattr(t, name) for t in trained], pa.int32()) for name in _PLACE]
    recorded = [episode.segments if row.lane == "train" else None for row, _, episode in samples]
    return [
        *places,
        _build_lists([_join(segments, "token_ids", sampled=False) for segments in recorded], np.int32),
        _build_lists([_join(segments, "logprobs", sampled=True) for segments in recorded], np.float32),
        _build_lists([_join(segments, "versions", sampled=True) for segments in recorded], np.int32),
    ]


def _join(segments: Sequence[Segment] | None, name: str, *, sampled: bool) -> NDArray[Any] | None:
    """Return an array of all segments, of all tokens or of the sampled ones."""
    if segments is None:
        return None
    arrays = [getattr(each, name)[each.loss_mask] if sampled else getattr(each, name) for each in segments]
    return np.concatenate(arrays) if arrays else np.zeros(0)


def _build_lists(arrays: Sequence[NDArray[Any] | None], dtype: DTypeLike) -> pa.Array:
    lengths = [0 if array is None else len(array) for array in arrays]
    offsets = pa.array(np.cumsum([0, *lengths]), pa.int32())
    values = np.concatenate([np.zeros(0, dtype), *(a.astype(dtype, copy=False) for a in arrays if a is not None)])
    return pa.ListArray.from_arrays(offsets, pa.array(values), mask=pa.array([array is None for array in arrays]))


def describe_scored(lane: Lane, step: int, group: Group, episode: Episode, write: Callable[[Any], str]) -> SampleRow:
    """Return what is known of a sample once it is scored. `write`: returns a text of a value."""
    truth = group.prompt.ground_truth
    return SampleRow(
        step=step,
        lane=lane,
        set=group.held_out or None,
        group=episode.group,
        sample=episode.sample,
        seat=episode.seat or None,
        trajectory=episode.trajectory,
        prompt_index=episode.prompt_index,
        prompt=write(group.prompt.prompt),
        ground_truth=None if truth is None else write(truth),
        completion=write(episode.text),
        truncated=episode.truncated,
        num_tokens=episode.num_tokens,
        num_sampled_tokens=episode.num_sampled,
        score=episode.score,
        failure=write(str(episode.failure)) if episode.failure else None,
        own_reward=episode.own_reward,
        ignored=[write(each) for each in episode.ignored],
    )


def _describe_sample(lane: Lane, step: int, group: Group, episode: Episode, decode: Decode | None) -> SampleRow:
    breaks = [None, *episode.breaks]
    segments = [_describe_segment(*pair, decode) for pair in zip(episode.segments, breaks, strict=True)]
    is_conversation = bool(episode.messages)
    has_parts = is_conversation or not _is_single(episode)
    added = {
        "within_episode": episode.baseline == "episode",
        "data_source": to_text(group.prompt.data_source),
        "weights": f"{episode.generation}:{episode.versions[0]}",
        "advantage": episode.advantage,
        "rewards": [describe_result(name, result) for name, result in episode.results.items()],
        "end": episode.end.value,
        "messages": to_text(episode.messages) if is_conversation else None,
        "state": to_text(episode.state) if is_conversation else None,
        "info": to_text(episode.info) if episode.info else None,
        "turns": [_describe_turn(turn) for turn in episode.turns] if has_parts else None,
        "segments": segments if has_parts else None,
    }
    return describe_scored(lane, step, group, episode, to_text).model_copy(update=added)


def _is_single(episode: Episode) -> bool:
    """Return whether it is one prompt and at most one answer to it, which needs no spans."""
    plain = [Turn(turn.text, turn.truncated, advantage=turn.advantage) for turn in episode.turns]
    is_short = len(plain) <= 1 and plain == episode.turns
    return is_short and len(episode.segments) == 1 and len(_find_spans(episode.segments[0].turns)) <= 2


def _describe_turn(turn: Turn) -> TurnRow:
    return TurnRow(
        text=to_text(turn.text),
        reward=turn.reward,
        advantage=turn.advantage,
        truncated=turn.truncated,
        user_seconds=turn.user_seconds,
        user_info=to_text(turn.user_info) if turn.user_info else None,
        tool_calls=[
            ToolCallRow(
                id=call.id,
                name=to_text(call.name),
                tool=call.tool or None,
                arguments=None if call.arguments is None else to_text(call.arguments),
                error=to_text(call.error) if call.error else None,
                seconds=call.seconds,
            )
            for call in turn.tool_calls
        ],
    )


def _describe_segment(segment: Segment, reason: ContextBreak | None, decode: Decode | None) -> SegmentRow:
    spans = []
    for start, end in _find_spans(segment.turns):
        text = to_text(decode(segment.token_ids[start:end].tolist())) if decode else None
        spans.append(SpanRow(start=start, end=end, turn=int(segment.turns[start]), text=text))
    return SegmentRow(
        num_tokens=len(segment.token_ids),
        cause=reason.cause if reason else None,
        difference=to_text(reason.difference) if reason else None,
        spans=spans,
    )


def _find_spans(turns: NDArray[np.int32]) -> list[tuple[int, int]]:
    """Return where each run of tokens of one turn, or of none, begins and ends."""
    starts = np.flatnonzero(np.append(True, np.diff(turns) != 0))[: len(turns)].tolist()
    return list(pairwise([*starts, len(turns)]))


def describe_result(name: str, result: ScoredResult) -> ResultRow:
    """Return what the log keeps of one reward's result."""
    return ResultRow(
        name=name,
        valid=result.valid,
        score=result.score,
        components={to_text(key): value for key, value in result.components.items()},
        reason=None if result.cause is None else str(result.cause),
        message=to_text(result.message),
        version=to_text(result.version),
        attempts=result.attempts,
        queue_seconds=result.queue_seconds,
        execute_seconds=result.execute_seconds,
        latency_seconds=result.latency_seconds,
    )


def to_text(value: Any) -> str:
    """Return a string unchanged, and anything else as JSON. Lone surrogates, which UTF-8 cannot encode, become '?'."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text.encode("utf-8", "replace").decode()
