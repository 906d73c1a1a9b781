"""Groups of a step as its file of the trajectory log has them: the reverse of trajectory_log.

Invariant: what is written again has the same samples and the same tokens. What only rewards read of a prompt is not in
the log, and stays empty.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rljob_api.errors import UserError
from rljob_api.run.trajectories import (
    FORMAT,
    FORMAT_KEY,
    REPLAY_COLUMNS,
    ResultRow,
    SampleRow,
)
from rljob_api.wire.base import InvalidReason
from rljob_api.wire.scores import ScoreResult
from rljob_inputs.prompts import Prompt
from rljob_trainer.episodes.types import (
    NOT_SAMPLED,
    ContextBreak,
    Episode,
    EpisodeEnd,
    EpisodeFailure,
    Group,
    ScoredResult,
    Segment,
    ToolCall,
    TrainedAs,
    Turn,
)


def read_groups(path: Path) -> list[Group]:
    """Return the groups of a step of training, in the order in which they trained. Raise UserError if the file cannot
    be read, or lacks what a replay needs."""
    table = _read_table(path)
    samples = [SampleRow.model_validate(row) for row in table.drop_columns(list(REPLAY_COLUMNS)).to_pylist()]
    tokens = zip(*(_split(table[name]) for name in ("token_ids", "logprobs", "versions")), strict=True)
    places = zip(*(table[name].to_pylist() for name in ("update", "part", "position")), strict=True)
    groups: dict[int, Group] = {}
    for row, recorded, place in zip(samples, tokens, places, strict=True):
        episode = build_episode(row, *recorded)
        group = groups.setdefault(row.group, Group(row.group, _build_prompt(row, episode), [], TrainedAs(*place)))
        group.episodes.append(episode)
    return sorted(groups.values(), key=lambda group: group.place.position)


def _read_table(path: Path) -> pa.Table:
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"{path}: cannot be read: {error}; restore it, or leave its step out with --steps") from None
    if (table.schema.metadata or {}).get(FORMAT_KEY.encode()) != FORMAT.encode():
        raise UserError(f"{path}: was written by another version of RLJob; replay it with that version")
    if missing := [name for name in REPLAY_COLUMNS if name not in table.schema.names]:
        raise UserError(
            f"{path}: has no {', '.join(missing)}: a version of RLJob wrote it that did not record what a replay "
            "needs; run the job again with this version"
        )
    if empty := [name for name in REPLAY_COLUMNS if table[name].null_count]:
        raise UserError(f"{path}: has samples without {', '.join(empty)}; only steps of training can be replayed")
    return table


def _split(column: pa.ChunkedArray) -> Iterator[NDArray[Any]]:
    """Yield the list of each row, without a copy."""
    for chunk in column.chunks:
        values, offsets = chunk.values.to_numpy(), chunk.offsets.to_pylist()
        yield from (values[start:end] for start, end in pairwise(offsets))


def build_episode(row: SampleRow, token_ids: NDArray[Any], logprobs: NDArray[Any], versions: NDArray[Any]) -> Episode:
    """`token_ids`: [tokens], the others [sampled], of all segments one after the other."""
    generation, _, _ = row.weights.rpartition(":")
    failure = None if row.failure is None else _build_failure(row.failure)
    return Episode(
        row.prompt_index,
        row.group,
        row.sample,
        seat=row.seat or "",
        trajectory=row.trajectory,
        baseline="episode" if row.within_episode else "group",
        segments=_build_segments(row, token_ids, logprobs, versions),
        turns=_build_turns(row, has_answer=len(logprobs) > 0),
        generation=generation,
        results={result.name: _build_result(result) for result in row.rewards},
        own_reward=row.own_reward,
        score=row.score,
        advantage=row.advantage,
        messages=_load(row.messages, []),
        state=_load(row.state, {}),
        info=_load(row.info, {}),
        end=EpisodeEnd(row.end or EpisodeEnd.ANSWERED),
        failure=failure,
        ignored=row.ignored,
        breaks=[ContextBreak(each.cause or "", each.difference or "") for each in (row.segments or [])[1:]],
    )


def _build_prompt(row: SampleRow, episode: Episode) -> Prompt:
    ids: list[int] = []
    if episode.segments:
        first = episode.segments[0]
        num_tokens = int(first.loss_mask.argmax()) if first.loss_mask.any() else len(first.token_ids)
        ids = first.token_ids[:num_tokens].tolist()
    return Prompt(row.prompt_index, row.prompt, ids, row.ground_truth, row.data_source)


def _build_segments(
    row: SampleRow, token_ids: NDArray[Any], logprobs: NDArray[Any], versions: NDArray[Any]
) -> list[Segment]:
    if row.segments is None:
        lengths, turns = [len(token_ids)], np.full(len(token_ids), NOT_SAMPLED, np.int32)
        turns[len(token_ids) - len(logprobs) :] = 0
    else:
        lengths, spans = [each.num_tokens for each in row.segments], [each.spans for each in row.segments]
        parts = [np.full(span.end - span.start, span.turn, np.int32) for span in chain.from_iterable(spans)]
        turns = np.concatenate([np.zeros(0, np.int32), *parts])
    mask = turns != NOT_SAMPLED
    arrays = (token_ids, mask, _spread(logprobs, mask, 0.0), _spread(versions, mask, NOT_SAMPLED), turns)
    bounds = np.cumsum(lengths)[:-1]
    return [Segment(*each) for each in zip(*(np.split(array, bounds) for array in arrays), strict=True)]


def _spread(sampled: NDArray[Any], mask: NDArray[np.bool_], elsewhere: float) -> NDArray[Any]:
    values = np.full(len(mask), elsewhere, sampled.dtype)
    values[mask] = sampled
    return values


def _build_turns(row: SampleRow, *, has_answer: bool) -> list[Turn]:
    if row.turns is None:
        single = Turn(row.completion, row.truncated, advantage=row.advantage)
        return [single] if has_answer or row.failure is None else []
    return [
        Turn(
            turn.text,
            turn.truncated,
            turn.reward,
            [
                ToolCall(c.id, c.name, _load(c.arguments, None), c.error or "", c.seconds or 0.0, c.tool or "")
                for c in turn.tool_calls
            ],
            turn.user_seconds,
            _load(turn.user_info, {}),
            turn.advantage,
        )
        for turn in row.turns
    ]


def _build_failure(text: str) -> EpisodeFailure:
    """`text`: of EpisodeFailure: PATH: REASON: MESSAGE."""
    path, reason, message = (*text.split(": ", 2), "", "")[:3]
    return EpisodeFailure(path.rpartition(".")[2], path, reason, message)


def _build_result(row: ResultRow) -> ScoreResult:
    cause = None if row.reason is None else InvalidReason(row.reason)
    fields: dict[str, Any] = {
        "id": row.name,
        "valid": row.valid,
        "score": row.score,
        "components": dict(row.components),
        "reason": None if row.valid else cause,
        "message": row.message,
        "version": row.version,
        "queue_seconds": row.queue_seconds or 0.0,
        "execute_seconds": row.execute_seconds or 0.0,
    }
    if row.attempts is None:
        return ScoreResult(**fields)
    fields |= {"attempts": row.attempts, "latency_seconds": row.latency_seconds or 0.0}
    return ScoredResult(**fields, failed_as=cause if row.valid else None)


def _load(text: str | None, default: Any) -> Any:
    return default if text is None else json.loads(text)


def find_unscored(groups: Iterable[Group], rewards: Sequence[str]) -> set[str]:
    """Return the rewards without a result in an episode that has not failed."""
    episodes = (episode for group in groups for episode in group.episodes if episode.failure is None)
    return {name for episode in episodes for name in rewards if name not in episode.results}
