from __future__ import annotations

import json
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.manifest.services.models import JudgeReward
from rljob_api.wire.base import InvalidReason
from rljob_service.models.execution import NoScoreError, Score
from rljob_service.models.judge.judge import (
    SINGLE_SAMPLE_SCORE,
    combine_votes,
    plan_questions,
    read_answer,
    score_samples,
)
from rljob_service.models.judge.parser import Parser

LIST = {"type": "object", "properties": {"order": {"type": "array"}, "sure": {"type": "number"}}}
TEXTS = ["a", "b", "c"]
FAILED = NoScoreError(InvalidReason.TIMEOUT, "late")


def parser(compare: str = "ranking", **changes: Any) -> Parser:
    spec = {"jsonSchema": LIST, "scorePath": "order"} if compare != "pairwise" else {"regex": r"Winner: (\S+)"}
    judge = {"template": "x", "endpoint": {"url": "http://x", "model": "m"}, "compare": compare}
    return Parser(JudgeReward.model_validate(judge | {"parser": spec | changes}))


def values(scores: list[Score | NoScoreError]) -> list[float | str]:
    return [score.value if isinstance(score, Score) else score.reason.value for score in scores]


def order(*numbers: Any, **others: Any) -> str:
    return json.dumps({"order": list(numbers), **others})


def test_pairwise_asks_each_pair_in_both_orders() -> None:
    questions = plan_questions("pairwise", TEXTS)
    assert [question.samples for question in questions] == list(permutations(range(3), 2))
    assert questions[0].fields == {"first": "a", "second": "b"}
    assert questions[2].fields == {"first": "b", "second": "a"}


def test_ranking_and_listwise_ask_once() -> None:
    for compare in ("ranking", "listwise"):
        (question,) = plan_questions(compare, TEXTS)  # type: ignore[arg-type]
        assert question.samples == (0, 1, 2)
        assert question.fields == {"completions": TEXTS}


def test_single_sample_has_the_mean_score_without_a_question() -> None:
    for compare in ("pairwise", "ranking"):
        assert plan_questions(compare, ["a"]) == []  # type: ignore[arg-type]
        assert values(score_samples(1, [], [])) == [SINGLE_SAMPLE_SCORE]
    assert len(plan_questions("listwise", ["a"])) == 1, "listwise scores need no comparison"


@given(st.permutations(range(1, 6)))
def test_ranking_spreads_scores_evenly_from_one_to_zero(numbers: list[int]) -> None:
    scores = values(read_answer("ranking", parser(), order(*numbers), 5))
    assert [scores[number - 1] for number in numbers] == [1, 0.75, 0.5, 0.25, 0]


def test_numbers_next_to_the_list_are_components_of_all_samples() -> None:
    scores = read_answer("ranking", parser(), order(2, 1, sure=0.5), 2)
    assert [score.components for score in scores if isinstance(score, Score)] == [{"sure": 0.5}] * 2


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (order(1, 2), "2 elements for 3 completions"),
        (order(1, 2, 2), "must contain each of 1 to 3 once"),
        (order(0, 1, 2), "must contain each of 1 to 3 once"),
        (order(1, 2, 2.5), "must contain each of 1 to 3 once"),
        (order(1, 2, "x"), "not a number"),
        (json.dumps({"order": 3}), 'is not of type "array"'),
        ("{}", "has no order"),
        ("none", "is not JSON"),
    ],
)
def test_incomplete_ranking_is_a_bad_return(answer: str, message: str) -> None:
    with pytest.raises(NoScoreError, match=message) as caught:
        read_answer("ranking", parser(), answer, 3)
    assert caught.value.reason is InvalidReason.BAD_RETURN


def test_listwise_elements_are_read_independently() -> None:
    scores = read_answer("listwise", parser("listwise", scores={"good": 1}), order(0.5, None, "good", "x"), 4)
    assert values(scores) == [0.5, "abstained", 1.0, "bad_return"]


def test_pair_scores_sum_to_one() -> None:
    reader = parser("pairwise", scores={"first": 1, "second": 0, "tie": 0.5})
    for answer, expected in (("first", [1, 0]), ("second", [0, 1]), ("tie", [0.5, 0.5]), ("0.75", [0.75, 0.25])):
        assert values(read_answer("pairwise", reader, f"Winner: {answer}", 2)) == expected


def test_pair_score_must_be_between_zero_and_one() -> None:
    with pytest.raises(NoScoreError, match="score is 4; with compare: pairwise it must be 1 if the first wins"):
        read_answer("pairwise", parser("pairwise"), "Winner: 4", 2)


def play(strength: list[int], failed: set[tuple[int, int]] = frozenset()) -> list[Score | NoScoreError]:  # type: ignore[assignment]
    """Return the scores by a judge that knows the strengths and does not answer the `failed` questions."""
    questions = plan_questions("pairwise", [str(s) for s in strength])

    def answer(i: int, j: int) -> list[Score | NoScoreError]:
        if (i, j) in failed:
            return [FAILED, FAILED]
        won = 0.5 * (1 + (strength[i] > strength[j]) - (strength[i] < strength[j]))
        return [Score(won), Score(1 - won)]

    return score_samples(
        len(strength), questions, [answer(i, j) for i, j in (question.samples for question in questions)]
    )


@given(st.lists(st.integers(0, 3), min_size=2, max_size=6))
def test_pairwise_score_is_the_fraction_of_won_comparisons(strength: list[int]) -> None:
    for own, score in zip(strength, play(strength), strict=True):
        won = sum((own > other) + 0.5 * (own == other) for other in strength) - 0.5
        assert isinstance(score, Score)
        assert score.value == pytest.approx(won / (len(strength) - 1))
        assert score.components == {"comparisons": 2.0 * (len(strength) - 1)}


def test_preference_for_the_first_place_cancels_out() -> None:
    questions = plan_questions("pairwise", TEXTS)
    assert values(score_samples(3, questions, [[Score(1.0), Score(0.0)]] * len(questions))) == [0.5] * 3


def test_more_than_half_of_the_comparisons_must_have_an_answer() -> None:
    scores = play([3, 2, 1], failed={(0, 1), (1, 0)})
    assert values(scores) == ["timeout", "timeout", 0.0], "2 of 4 are not enough"
    assert "2 of 4 comparisons failed, the first: late" in str(scores[0])
    scores = play([3, 2, 1], failed={(0, 1)})
    assert values(scores) == [1.0, pytest.approx(2 / 3), 0.0], "the mean of the remaining comparisons"
    assert isinstance(scores[0], Score)
    assert scores[0].components == {"comparisons": 3.0}


def test_votes_are_combined_per_sample() -> None:
    votes = [[Score(1.0), FAILED], [Score(0.0), FAILED], [Score(1.0), Score(0.5)], FAILED, [Score(1.0), Score(0.5)]]
    first, second = combine_votes(votes, "majority", 2)  # type: ignore[arg-type]
    assert isinstance(first, Score)
    assert (first.value, first.components) == (1.0, {"votes": 4.0, "agreement": 0.75})
    assert isinstance(second, NoScoreError), "2 of 5"
