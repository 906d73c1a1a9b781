"""Where a run reports to, and what episodes report the moment they are scored: the trajectory log has a sample when its
step has ended.

Invariant: the samples that were scored last are bounded in number and in the length of each text, so that neither long
answers nor large steps cost memory.
"""

import logging
import secrets
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from rljob_api.manifest.status import RewardProblem
from rljob_api.run.recent import RecentSamples
from rljob_api.run.trajectories import SampleRow
from rljob_api.wire.base import Lane
from rljob_trainer.driver.problems import ProblemLog
from rljob_trainer.driver.status import StatusBoard
from rljob_trainer.episodes.types import Episode, Group
from rljob_trainer.history.prometheus import PrometheusMetrics
from rljob_trainer.history.tracking import Trackers
from rljob_trainer.history.trajectory_log import Decode, describe_result, describe_scored, to_text

log = logging.getLogger(__name__)

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
        rewards = []
        for name, result in islice(episode.results.items(), _MAX_RESULTS):
            # Without components: their number has no limit.
            changes = {"components": {}, "message": _shorten(result.message), "version": ""}
            rewards.append(describe_result(name, result).model_copy(update=changes))
        scored = describe_scored(lane, step, group, episode, _shorten)
        self._rows.append(scored.model_copy(update={"rewards": rewards}))
        self._next += 1

    def read(self, after: int) -> RecentSamples:
        """Return the samples with the numbers from `after` on, as far as they are kept."""
        first = self._next - len(self._rows)
        samples = list(islice(self._rows, max(0, after - first), None)) if after <= self._next else []
        return RecentSamples(feed=self._feed, next=self._next, samples=samples)


def _shorten(value: Any) -> str:
    """Return a text, or anything else as JSON, without its middle. Lone surrogates become '?'."""
    text = to_text(value)
    half = _MAX_CHARACTERS // 2
    if len(text) > _MAX_CHARACTERS:
        text = f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
    return text


@dataclass(frozen=True)
class Reports:
    board: StatusBoard
    trackers: Trackers
    prometheus: PrometheusMetrics
    decode: Decode | None = None
    """Shows the tokens of conversations in the trajectory log."""
    problems: ProblemLog = field(default_factory=ProblemLog)
    recent: RecentSampleLog = field(default_factory=RecentSampleLog)

    def record_damaged(self, step: int, checkpoints: Mapping[str, str]) -> None:
        """Report damaged checkpoints, with their causes, and the step from which the job resumes."""
        self.problems.record_damaged(step, checkpoints)
        self.board.update(problems=self.problems.failures)

    def record_scored(self, lane: Lane, group: Group, episode: Episode) -> None:
        """Report an episode whose last reward has arrived, and problems of a new kind."""
        self.prometheus.record_scored(lane, episode)
        step = self.board.status.step + (lane == "train")
        self.recent.record(lane, step, group, episode)
        new = self.problems.record(step, episode)
        for problem in new:
            log.warning("%s", RewardProblem.of(problem).describe())
        if new:
            self.board.update(problems=self.problems.failures)
