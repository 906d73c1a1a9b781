"""The first reasons for which samples have no valid score, or worked without their sandbox; and damaged checkpoints.
Pure.

Invariant: bounded in number and length, whatever user code raises. A message that differs from an earlier one only in
numbers and quoted values is of the same kind.
"""

import re
from collections.abc import Iterable, Iterator, Mapping

from rljob_api.wire.base import InvalidReason
from rljob_api.wire.driver_status import FIELD_CHECKPOINT, MAX_PROBLEM_LENGTH, MAX_PROBLEMS, DriverProblem
from rljob_api.wire.text import clean_line
from rljob_trainer.episodes.types import Episode, Group, failed_as

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
        if cause := result.reason or failed_as(result):
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
