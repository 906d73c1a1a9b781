"""Plan the questions about a group, and combine the answers. Pure.

An answer gives a score to each sample of its question. pairwise asks about each pair in both orders, so that a
preference for the first place cancels out; ranking and listwise ask once about all samples. Invariant: an unreadable
answer makes only its samples invalid, and never counts as zero.
"""

from collections.abc import Sequence
from itertools import permutations
from typing import Any, Literal, NamedTuple

from rljob_service.models.execution import NoScoreError, Score
from rljob_service.models.judge.parser import (
    Parser,
    combine,
    mean_components,
    mean_value,
    require_majority,
    unreadable,
    value_or_error,
)

Compare = Literal["pairwise", "ranking", "listwise"]
Scores = list[Score | NoScoreError]
"""One per sample of the question or group."""

SINGLE_SAMPLE_SCORE = 0.5
"""Score of the only sample of a group: the mean of every group, and a tie with itself."""

TEMPLATE_FIELDS: dict[Compare, tuple[str, ...]] = {
    "pairwise": ("first", "second"),
    "ranking": ("completions",),
    "listwise": ("completions",),
}
"""Variables of the template, instead of `completion`."""


class ComparisonQuestion(NamedTuple):
    """One question about some samples of a group."""

    samples: tuple[int, ...]
    """Indices of the samples, in the order of the question."""
    fields: dict[str, Any]
    """Values of TEMPLATE_FIELDS."""


def plan_questions(compare: Compare, completions: Sequence[str]) -> list[ComparisonQuestion]:
    """Return all questions; none if there is nothing to compare."""
    indices = range(len(completions))
    if compare == "listwise" or (compare == "ranking" and len(completions) > 1):
        return [ComparisonQuestion(tuple(indices), {"completions": list(completions)})]
    if compare == "ranking":
        return []
    pairs = permutations(indices, 2)
    return [ComparisonQuestion((i, j), {"first": completions[i], "second": completions[j]}) for i, j in pairs]


def read_answer(compare: Compare, parser: Parser, answer: str, num_samples: int) -> Scores:
    """Return the scores of the question's samples. Raises NoScoreError if the whole answer is unreadable."""
    if compare == "pairwise":
        return _read_pair(parser.read(answer), answer)
    values, components = parser.read_list(answer)
    if len(values) != num_samples:
        raise unreadable(f"the judge's list has {len(values)} elements for {num_samples} completions", answer)
    if compare == "ranking":
        return _read_ranking([parser.to_number(value, answer) for value in values], components, answer)
    numbers = [value_or_error(parser.to_number, value, answer) for value in values]
    return [number if isinstance(number, NoScoreError) else Score(number, components) for number in numbers]


def combine_votes(votes: Sequence[Scores | NoScoreError], aggregate: str, num_samples: int) -> Scores:
    return [
        value_or_error(combine, [vote if isinstance(vote, NoScoreError) else vote[i] for vote in votes], aggregate)
        for i in range(num_samples)
    ]


def score_samples(num_samples: int, questions: Sequence[ComparisonQuestion], answers: Sequence[Scores]) -> Scores:
    """Return the mean of each sample's comparisons. More than half of them must have an answer."""
    found: list[Scores] = [[] for _ in range(num_samples)]
    for question, answer in zip(questions, answers, strict=True):
        for index, score in zip(question.samples, answer, strict=True):
            found[index].append(score)
    return [value_or_error(_mean_of, scores) if scores else Score(SINGLE_SAMPLE_SCORE) for scores in found]


def _mean_of(comparisons: Scores) -> Score:
    scores = require_majority(comparisons, "comparisons")
    if len(comparisons) == 1:
        return scores[0]
    return Score(mean_value(scores), mean_components(scores) | {"comparisons": float(len(scores))})


def _read_pair(score: Score, answer: str) -> Scores:
    if not 0 <= score.value <= 1:
        raise unreadable(
            f"the judge's score is {score.value:g}; with compare: pairwise it must be 1 if the first wins, "
            "0 if it loses, or between (judge.parser.scores maps words to numbers)",
            answer,
        )
    return [score, Score(1 - score.value, score.components)]


def _read_ranking(ranked: list[float], components: dict[str, float], answer: str) -> Scores:
    if sorted(ranked) != list(range(1, len(ranked) + 1)):
        raise unreadable(f"the judge's ranking must contain each of 1 to {len(ranked)} once", answer)
    scores: Scores = [Score(0.0)] * len(ranked)
    for place, number in enumerate(ranked):
        scores[int(number) - 1] = Score(1 - place / (len(ranked) - 1), components)
    return scores
