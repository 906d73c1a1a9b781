"""The trajectory log: every sample with all of its scores, in one Parquet file per step and lane.

Columns of a conversation. With agent.type singleTurn, all but the first two are null:

    end        why it ended: answered, user, max_turns, truncated, context, returned, failed (EpisodeEnd)
    failure    why it is invalid, with the field of the job: `spec.agent.user: timeout: ...`; null for a valid one
    messages   JSON list of all chat messages, prompt first
    state      JSON object that the simulated user returned last, or the environment or the program at the end
    own_reward of the environment or the program for the episode, unweighted; null: none
    info       JSON object that the environment or the program returned for the log; null: none
    turns      one entry for each answer of the policy: text, reward (null: none), advantage (mean of its tokens; null:
               not trained), truncated, user_seconds, user_info (JSON; null: none), and tool_calls: id, name, tool (of
               the job; null: no such function), arguments (JSON object; null: not JSON), error (null: it has a result),
               seconds
    segments   the sequences of tokens that are trained, one after the other: num_tokens, cause and difference (why it
               does not continue the one before: null for the first), spans. A span is a run of tokens of one kind:
               start, end (tokens, end excluded), turn (index into turns; -1: context, which the policy did not
               sample), text (with special tokens). Spans with turn >= 0 are trained, if `advantage` is not null.

`completion` is the last answer. `prompt` has the messages of the data.

Invariants: a file is complete or does not exist; a repeated step replaces its file; an invalid result has a reason and
no score; an unknown value is null.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rljob_api.wire.protocol import Lane, ScoreResult
from rljob_inputs.prompts import Prompt
from rljob_trainer.episodes.types import ContextBreak, Episode, Group, ScoredResult, Segment, ToolCall, Turn
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
_TOOL_CALL = pa.struct(
    [
        ("id", pa.string()),
        ("name", pa.string()),
        ("tool", pa.string()),
        ("arguments", pa.string()),
        ("error", pa.string()),
        ("seconds", pa.float64()),
    ]
)
_TURN = pa.struct(
    [
        ("text", pa.string()),
        ("reward", pa.float64()),
        ("advantage", pa.float64()),
        ("truncated", pa.bool_()),
        ("user_seconds", pa.float64()),
        ("user_info", pa.string()),
        ("tool_calls", pa.list_(_TOOL_CALL)),
    ]
)
_SPAN = pa.struct([("start", pa.int32()), ("end", pa.int32()), ("turn", pa.int32()), ("text", pa.string())])
_SEGMENT = pa.struct(
    [
        ("num_tokens", pa.int32()),
        ("cause", pa.string()),
        ("difference", pa.string()),
        ("spans", pa.list_(_SPAN)),
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
        ("end", pa.string()),
        ("failure", pa.string()),
        ("messages", pa.string()),
        ("state", pa.string()),
        ("own_reward", pa.float64()),
        ("info", pa.string()),
        ("turns", pa.list_(_TURN)),
        ("segments", pa.list_(_SEGMENT)),
    ],
    metadata={"rljob.trajectories": FORMAT},
)


Decode = Callable[[list[int]], str]
"""Token ids to text, with special tokens."""


class TrajectoryLog:
    """Accepts samples immediately, and writes them in order in a separate thread."""

    def __init__(self, run_dir: Path, max_mib: int, decode: Decode | None = None) -> None:
        """`decode`: None, if no sample is a conversation."""
        self._run_dir, self._decode = run_dir, decode
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
                write_file(path, lane, step, groups, self._decode)
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


def write_file(path: Path, lane: Lane, step: int, groups: Sequence[Group], decode: Decode | None = None) -> None:
    """Write one step's samples atomically, in the order of the data."""
    rows = (describe_sample(lane, step, group.prompt, e, decode) for group in groups for e in group.episodes)
    table = pa.Table.from_batches(_convert(rows), schema=SCHEMA)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    pq.write_table(table, temporary, compression="zstd")
    rename_durably(temporary, path)


def _convert(rows: Iterator[dict[str, Any]]) -> Iterator[pa.RecordBatch]:
    while some := list(islice(rows, _ROWS_PER_BATCH)):
        yield pa.RecordBatch.from_pylist(some, schema=SCHEMA)


def describe_sample(
    lane: Lane, step: int, prompt: Prompt, episode: Episode, decode: Decode | None = None
) -> dict[str, Any]:
    breaks = [None, *episode.breaks]
    segments = [_describe_segment(*pair, decode) for pair in zip(episode.segments, breaks, strict=True)]
    is_conversation = bool(episode.messages)
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
        "end": str(episode.end),
        "failure": _text(str(episode.failure)) if episode.failure else None,
        "messages": _text(episode.messages) if is_conversation else None,
        "state": _text(episode.state) if is_conversation else None,
        "own_reward": episode.own_reward,
        "info": _text(episode.info) if episode.info else None,
        "turns": [_describe_turn(turn) for turn in episode.turns] if is_conversation else None,
        "segments": segments if is_conversation else None,
    }


def _describe_turn(turn: Turn) -> dict[str, Any]:
    return {
        "text": _text(turn.text),
        "reward": turn.reward,
        "advantage": turn.advantage,
        "truncated": turn.truncated,
        "user_seconds": turn.user_seconds,
        "user_info": _text(turn.user_info) if turn.user_info else None,
        "tool_calls": [_describe_call(call) for call in turn.tool_calls],
    }


def _describe_call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "name": _text(call.name),
        "tool": call.tool or None,
        "arguments": None if call.arguments is None else _text(call.arguments),
        "error": _text(call.error) if call.error else None,
        "seconds": call.seconds,
    }


def _describe_segment(segment: Segment, reason: ContextBreak | None, decode: Decode | None) -> dict[str, Any]:
    spans, start = [], 0
    for turn, tokens in groupby(segment.turns):
        end = start + sum(1 for _ in tokens)
        text = _text(decode(segment.token_ids[start:end])) if decode else None
        spans.append({"start": start, "end": end, "turn": turn, "text": text})
        start = end
    return {
        "num_tokens": len(segment.token_ids),
        "cause": reason.cause if reason else None,
        "difference": _text(reason.difference) if reason else None,
        "spans": spans,
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
