"""Where a run reports to, and what episodes report the moment they are scored: the trajectory log has a sample when its
step has ended.

Invariant: the samples that were scored last are bounded in number and in the length of each text, so that neither long
answers nor large steps cost memory.

`ProblemLog` is pure. It has the first reasons for which samples have no valid score, or worked without their sandbox;
and damaged checkpoints: bounded in number and length, whatever user code raises. A message that differs from an earlier
one only in numbers and quoted values is of the same kind.
"""

import logging
import re
import secrets
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from rljob_api.manifest.status import RewardProblem
from rljob_api.run.trajectories import RecentSamples, SampleRow
from rljob_api.wire.base import InvalidReason, Lane
from rljob_api.wire.driver_status import FIELD_CHECKPOINT, MAX_PROBLEM_LENGTH, MAX_PROBLEMS, DriverProblem
from rljob_api.wire.text import clean_line
from rljob_trainer.driver.status import StatusBoard
from rljob_trainer.episodes.types import Episode, Group
from rljob_trainer.history.prometheus import PrometheusMetrics
from rljob_trainer.history.tracking import Trackers
from rljob_trainer.history.trajectory_log import Decode, describe_result, describe_scored, to_text

_VARIABLE = re.compile(r"'[^']*'|\"[^\"]*\"|\d+(?:\.\d+)?")
_PLACE = re.compile(r"\S+:\d+: ")
"""File and line, as a reward server reports an exception: these numbers do distinguish."""


class ProblemLog:
    def __init__(self) -> None:
        self._found: dict[tuple[str, ...], DriverProblem] = {}
        self._damaged: dict[str, DriverProblem] = {}

    @property
    def all(self) -> list[DriverProblem]:
        """In the order of their first samples, abstentions included."""
        return list(self._found.values())

    @property
    def failures(self) -> list[DriverProblem]:
        """Those to show: a reward that abstains does so on purpose. A program without any reward is an error."""
        found = [each for each in self.all if each.reason != InvalidReason.ABSTAINED or is_field(each)]
        return [*self._damaged.values(), *found][:MAX_PROBLEMS]

    def record_damaged(self, step: int, checkpoints: Mapping[str, str]) -> None:
        """`checkpoints`: why each damaged one is, by the name of its folder. `step`: from which the job resumes."""
        for name in checkpoints.keys() - self._damaged.keys():
            message = clean_message(f"{checkpoints[name]}; it is kept as {name}, and the job resumed from step {step}")
            self._damaged[name] = DriverProblem(reward=FIELD_CHECKPOINT, reason="damaged", message=message, step=step)

    def record(self, step: int, episode: Episode) -> list[DriverProblem]:
        """Count what failed in an episode. Return what is of a new kind."""
        new = []
        for where, reason, text in _problems_of(episode):
            message = clean_message(text)
            key = (where, reason, kind_of(message))
            if key in self._found:
                self._found[key].count += 1
            elif len(self._found) < MAX_PROBLEMS:
                self._found[key] = DriverProblem(reward=where, reason=reason, message=message, step=step)
                new.append(self._found[key])
        return new


def _problems_of(episode: Episode) -> Iterator[tuple[str, str, str]]:
    """Yield the reward or the field of the job, the reason and the message of each problem."""
    for failure in (*([episode.failure] if episode.failure else []), *episode.sandbox_failures):
        yield failure.path, failure.reason, failure.message
    for name, result in episode.results.items():
        if cause := result.cause:
            yield name, str(cause), result.message


def is_field(problem: DriverProblem) -> bool:
    """Whether an episode failed before a reward could score it."""
    return problem.reward.startswith("spec.")


def find_problems(step: int, groups: Iterable[Group]) -> list[DriverProblem]:
    """Return the problems of one step."""
    found = ProblemLog()
    for group in groups:
        for episode in group.episodes:
            found.record(step, episode)
    return found.all


def clean_message(message: str) -> str:
    """Return one line without control characters and lone surrogates: terminals and JSON get it."""
    return clean_line(message, MAX_PROBLEM_LENGTH)


def kind_of(message: str) -> str:
    place = _PLACE.match(message)
    start = place.end() if place else 0
    return message[:start] + _VARIABLE.sub("#", message[start:])


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
