"""The samples that were scored last, for those who watch a run: the trajectory log has them when their step has ended.

Invariant: bounded in number and in the length of each text, so that neither long answers nor large steps cost memory.
"""

import secrets
from collections import deque
from itertools import islice
from typing import Any

from rljob_api.run.recent import RecentSamples
from rljob_api.run.trajectories import ResultRow, SampleRow
from rljob_api.wire.base import Lane
from rljob_api.wire.scores import ScoreResult
from rljob_trainer.episodes.types import Episode, Group
from rljob_trainer.history.trajectory_log import describe_result, describe_scored, to_text

_MAX_SAMPLES = 512
_MAX_CHARACTERS = 1_000
"""Limit of one text. 512 samples take about 2 MB, and at most 16 MB more if each has 32 long messages of rewards."""
_MAX_RESULTS = 32


class RecentSampleLog:
    def __init__(self) -> None:
        self._feed = secrets.token_hex(4)
        self._rows: deque[SampleRow] = deque(maxlen=_MAX_SAMPLES)
        self._next = 0

    def record(self, lane: Lane, step: int, group: Group, episode: Episode) -> None:
        rewards = [_describe_result(*each) for each in islice(episode.results.items(), _MAX_RESULTS)]
        scored = describe_scored(lane, step, group, episode, _shorten)
        self._rows.append(scored.model_copy(update={"rewards": rewards}))
        self._next += 1

    def read(self, after: int) -> RecentSamples:
        """Return the samples with the numbers from `after` on, as far as they are kept."""
        first = self._next - len(self._rows)
        samples = list(islice(self._rows, max(0, after - first), None)) if after <= self._next else []
        return RecentSamples(feed=self._feed, next=self._next, samples=samples)


def _describe_result(name: str, result: ScoreResult) -> ResultRow:
    """Without components: their number has no limit."""
    row = describe_result(name, result)
    return row.model_copy(update={"components": {}, "message": _shorten(result.message), "version": ""})


def _shorten(value: Any) -> str:
    """Return a text, or anything else as JSON, without its middle. Lone surrogates become '?'."""
    text = to_text(value)
    half = _MAX_CHARACTERS // 2
    if len(text) > _MAX_CHARACTERS:
        text = f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
    return text
