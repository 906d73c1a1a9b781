"""From questions about a group to a score for each of its samples, without asking anybody."""

from __future__ import annotations

import json
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.manifest.scorers import JudgeReward
from rljob_api.wire.protocol import InvalidReason
from rljob_reward.models.judge.comparing import ALONE, combine_votes, plan_questions, read_answer, score_samples
from rljob_reward.models.judge.parser import Parser
from rljob_reward.models.model_slots import NoScoreError, Score

LIST = {"type": "object", "properties": {"order": {"type": "array"}, "sure": {"type": "number"}}}
TEXTS = ["a", "b", "c"]
FAILED = NoScoreError(InvalidReason.TIMEOUT, "late")


def parser(compare: str = "ranking", **changes: Any) -> Parser:
    spec = {"jsonSchema": LIST, "scorePath": "order"} if compare != "pairwise" else {"regex": r"Winner: (\S+)"}
    judge = {"template": "x", "endpoint": {"url": "http://x", "model": "m"}, "compare": compare}
    return Parser(JudgeReward.model_validate(judge | {"parser": spec | changes}))


def values(scores: list[Score | NoScoreError]) -> list[float | str]:
    return [score.value if isinstance(score, Score) else score.reason.value for score in scores]


def order(*numbers: Any, **beside: Any) -> str:
    return json.dumps({"order": list(numbers), **beside})


def test_each_two_are_asked_about_in_both_orders() -> None:
    asked = plan_questions("pairwise", TEXTS)
    assert [ask.about for ask in asked] == list(permutations(range(3), 2))
    assert asked[0].fields == {"first": "a", "second": "b"}
    assert asked[2].fields == {"first": "b", "second": "a"}


def test_ranking_and_listwise_ask_once_about_all() -> None:
    for compare in ("ranking", "listwise"):
        (ask,) = plan_questions(compare, TEXTS)  # type: ignore[arg-type]
        assert ask.about == (0, 1, 2)
        assert ask.fields == {"completions": TEXTS}


def test_a_sample_alone_has_the_mean_of_every_group_and_nothing_is_asked() -> None:
    for compare in ("pairwise", "ranking"):
        assert plan_questions(compare, ["a"]) == []  # type: ignore[arg-type]
        assert values(score_samples(1, [], [])) == [ALONE]
    assert len(plan_questions("listwise", ["a"])) == 1, "a score needs no other to compare with"


@given(st.permutations(range(1, 6)))
def test_a_ranking_spreads_the_scores_evenly_from_one_to_zero(numbers: list[int]) -> None:
    scores = values(read_answer("ranking", parser(), order(*numbers), 5))
    assert [scores[number - 1] for number in numbers] == [1, 0.75, 0.5, 0.25, 0]


def test_numbers_beside_the_list_are_components_of_all() -> None:
    scores = read_answer("ranking", parser(), order(2, 1, sure=0.5), 2)
    assert [score.components for score in scores if isinstance(score, Score)] == [{"sure": 0.5}] * 2


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (order(1, 2), "2 elements for 3 completions"),
        (order(1, 2, 2), "does not have each of 1 to 3 once"),
        (order(0, 1, 2), "does not have each of 1 to 3 once"),
        (order(1, 2, 2.5), "does not have each of 1 to 3 once"),
        (order(1, 2, "x"), "no number"),
        (json.dumps({"order": 3}), "is no list"),
        ("{}", "has no order"),
        ("none", "is no JSON"),
    ],
)
def test_an_answer_that_ranks_not_all_of_them_is_none(answer: str, words: str) -> None:
    with pytest.raises(NoScoreError, match=words) as caught:
        read_answer("ranking", parser(), answer, 3)
    assert caught.value.reason is InvalidReason.BAD_RETURN


def test_of_a_list_of_scores_each_is_read_for_itself() -> None:
    scores = read_answer("listwise", parser("listwise", scores={"good": 1}), order(0.5, None, "good", "x"), 4)
    assert values(scores) == [0.5, "abstained", 1.0, "bad_return"]


def test_what_the_first_wins_the_second_loses() -> None:
    reader = parser("pairwise", scores={"first": 1, "second": 0, "tie": 0.5})
    for answer, expected in (("first", [1, 0]), ("second", [0, 1]), ("tie", [0.5, 0.5]), ("0.75", [0.75, 0.25])):
        assert values(read_answer("pairwise", reader, f"Winner: {answer}", 2)) == expected


def test_a_comparison_is_between_losing_and_winning() -> None:
    with pytest.raises(NoScoreError, match="score is 4; with compare: pairwise it is 1 where the first wins"):
        read_answer("pairwise", parser("pairwise"), "Winner: 4", 2)


def play(strength: list[int], failed: set[tuple[int, int]] = frozenset()) -> list[Score | NoScoreError]:  # type: ignore[assignment]
    """Scores by a judge who knows the strengths and gives no answer to some questions."""
    asked = plan_questions("pairwise", [str(s) for s in strength])

    def answer(i: int, j: int) -> list[Score | NoScoreError]:
        if (i, j) in failed:
            return [FAILED, FAILED]
        won = 0.5 * (1 + (strength[i] > strength[j]) - (strength[i] < strength[j]))
        return [Score(won), Score(1 - won)]

    return score_samples(len(strength), asked, [answer(i, j) for i, j in (ask.about for ask in asked)])


@given(st.lists(st.integers(0, 3), min_size=2, max_size=6))
def test_a_samples_score_is_the_share_of_its_comparisons_that_it_won(strength: list[int]) -> None:
    for own, score in zip(strength, play(strength), strict=True):
        won = sum((own > other) + 0.5 * (own == other) for other in strength) - 0.5
        assert isinstance(score, Score)
        assert score.value == pytest.approx(won / (len(strength) - 1))
        assert score.components == {"comparisons": 2.0 * (len(strength) - 1)}


def test_a_liking_for_the_first_place_cancels_out() -> None:
    asked = plan_questions("pairwise", TEXTS)
    assert values(score_samples(3, asked, [[Score(1.0), Score(0.0)]] * len(asked))) == [0.5] * 3


def test_more_than_half_of_a_samples_comparisons_must_have_an_answer() -> None:
    scores = play([3, 2, 1], failed={(0, 1), (1, 0)})
    assert values(scores) == ["timeout", "timeout", 0.0], "2 of 4 are not enough for the two"
    assert "2 of 4 comparisons failed, the first: late" in str(scores[0])
    scores = play([3, 2, 1], failed={(0, 1)})
    assert values(scores) == [1.0, pytest.approx(2 / 3), 0.0], "the mean of those that there are"
    assert isinstance(scores[0], Score)
    assert scores[0].components == {"comparisons": 3.0}


def test_votes_are_combined_sample_by_sample() -> None:
    votes = [[Score(1.0), FAILED], [Score(0.0), FAILED], [Score(1.0), Score(0.5)], FAILED, [Score(1.0), Score(0.5)]]
    first, second = combine_votes(votes, "majority", 2)  # type: ignore[arg-type]
    assert isinstance(first, Score)
    assert (first.value, first.components) == (1.0, {"votes": 4.0, "agreement": 0.75})
    assert isinstance(second, NoScoreError), "2 of 5"
