"""What a judge is asked about a group, and what its answers come to. Pure.

Every way to compare is questions about some samples and, of each answer, a score for each of those: pairwise asks about
each two in both orders, so that a liking for the first place cancels out; ranking and listwise ask once about all.
Invariant: what cannot be read costs the samples that it was about, and is never a zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any, Literal, NamedTuple

from rljob_api.wire.protocol import InvalidReason
from rljob_reward.models.judge.parser import Parser, combine, mean_components, mean_value, readable
from rljob_reward.models.model_slots import NoScoreError, Score
from rljob_reward.models.texts import describe

Compare = Literal["pairwise", "ranking", "listwise"]
Scores = list[Score | NoScoreError]
"""One for each sample that is spoken of."""

ALONE = 0.5
"""Score of a sample that there is nothing to compare with: the mean of every group, and a tie with itself."""

NAMES: dict[str, tuple[str, ...]] = {
    "pairwise": ("first", "second"),
    "ranking": ("completions",),
    "listwise": ("completions",),
}
"""What a template has in place of `completion`."""


class Ask(NamedTuple):
    """One question."""

    about: tuple[int, ...]
    """Numbers of the samples, in the order in which it has them."""
    fields: dict[str, Any]
    """What the template has of them."""


def plan_questions(compare: Compare, completions: Sequence[str]) -> list[Ask]:
    """All that is to be asked; nothing where there is nothing to compare."""
    numbers = range(len(completions))
    if compare == "listwise" or (compare == "ranking" and len(completions) > 1):
        return [Ask(tuple(numbers), {"completions": list(completions)})]
    if compare == "ranking":
        return []
    pairs = permutations(numbers, 2)
    return [Ask((i, j), {"first": completions[i], "second": completions[j]}) for i, j in pairs]


def read_answer(compare: Compare, parser: Parser, answer: str, num_samples: int) -> Scores:
    """The scores of the samples that the question was about. NoScoreError where it speaks of none of them."""
    if compare == "pairwise":
        return _read_pair(parser.read(answer), answer)
    values, components = parser.read_list(answer)
    if len(values) != num_samples:
        raise _unreadable(f"the judge's list has {len(values)} elements for {num_samples} completions", answer)
    if compare == "ranking":
        return _read_ranking([parser.to_number(value, answer) for value in values], components, answer)
    return [_read_element(parser, value, components, answer) for value in values]


def combine_votes(votes: Sequence[Scores | NoScoreError], aggregate: str, num_samples: int) -> Scores:
    """Of each sample, one score of all votes."""
    return [
        _or_error(combine, [vote if isinstance(vote, NoScoreError) else vote[i] for vote in votes], aggregate)
        for i in range(num_samples)
    ]


def score_samples(num_samples: int, questions: Sequence[Ask], answers: Sequence[Scores]) -> Scores:
    """Of each sample, the mean of its comparisons, of which more than half must have an answer."""
    found: list[Scores] = [[] for _ in range(num_samples)]
    for question, answer in zip(questions, answers, strict=True):
        for number, score in zip(question.about, answer, strict=True):
            found[number].append(score)
    return [_or_error(_mean_of, scores) if scores else Score(ALONE) for scores in found]


def _mean_of(comparisons: Scores) -> Score:
    scores = readable(comparisons, "comparisons")
    if len(comparisons) == 1:
        return scores[0]
    return Score(mean_value(scores), mean_components(scores) | {"comparisons": float(len(scores))})


def _read_pair(score: Score, answer: str) -> Scores:
    if not 0 <= score.value <= 1:
        raise _unreadable(
            f"the judge's score is {score.value:g}; with compare: pairwise it is 1 where the first wins, 0 where it "
            "loses, or between (judge.parser.scores gives words their numbers)",
            answer,
        )
    return [score, Score(1 - score.value, score.components)]


def _read_ranking(ranked: list[float], components: dict[str, float], answer: str) -> Scores:
    if sorted(ranked) != list(range(1, len(ranked) + 1)):
        raise _unreadable(f"the judge's ranking does not have each of 1 to {len(ranked)} once", answer)
    scores: Scores = [Score(0.0)] * len(ranked)
    for place, number in enumerate(ranked):
        scores[int(number) - 1] = Score(1 - place / (len(ranked) - 1), components)
    return scores


def _read_element(parser: Parser, value: Any, components: dict[str, float], answer: str) -> Score | NoScoreError:
    try:
        return Score(parser.to_number(value, answer), components)
    except NoScoreError as error:
        return error


def _or_error(make: Callable[..., Score], *arguments: Any) -> Score | NoScoreError:
    try:
        return make(*arguments)
    except NoScoreError as error:
        return error


def _unreadable(message: str, answer: str) -> NoScoreError:
    return NoScoreError(InvalidReason.BAD_RETURN, f"{message}: {describe(answer)}")
