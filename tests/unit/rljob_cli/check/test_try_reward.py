"""The requests that `rljob test-reward` sends, and the labels of their results."""

from __future__ import annotations

import pytest

from rljob_api.wire.protocol import ScoreResult
from rljob_cli.check.try_reward import build_groups, build_request, build_table, label_outcomes
from rljob_cli.tables import to_text

ROWS = [
    {"completion": "a", "prompt": "1+1?", "answer": "2"},
    {"completion": "b", "prompt": "2+2?", "answer": "4"},
    {"completion": "c", "prompt": "1+1?", "answer": "2", "num_tokens": 7},
]


def completions(groups):
    return [[request.completion for request in group] for group in groups]


def test_rows_with_the_same_prompt_form_a_group_if_the_reward_scores_groups():
    groups = build_groups(ROWS, "sums", in_groups=True)
    assert completions(groups) == [["a", "c"], ["b"]]
    assert groups[0][1].extra_info["num_tokens"] == 7
    assert completions(build_groups(ROWS, "sums", in_groups=False)) == [["a"], ["b"], ["c"]]


def test_column_group_decides_the_group_of_a_row():
    rows = [{**row, "group": number} for row, number in zip(ROWS, (1, 1, 2), strict=True)]
    groups = build_groups(rows, "", in_groups=True)
    assert completions(groups) == [["a", "b"], ["c"]]
    assert "group" not in groups[0][0].extra_info
    assert build_groups(rows, "", in_groups=False)[0][0].extra_info["group"] == 1, "otherwise it is any other column"


def test_samples_are_numbered_within_their_groups():
    groups = build_groups(ROWS, "", in_groups=True)
    results = [[ScoreResult(id=request.id, valid=True, score=0.0) for request in group] for group in groups]
    assert [outcome.label for outcome in label_outcomes(groups, results, in_groups=True)] == ["1.1", "1.2", "2.1"]


def test_rows_may_have_token_ids_for_rewards_that_read_them():
    [[request]] = build_groups([{"completion": "a", "prompt_ids": [1], "completion_ids": [2, 3]}], "", in_groups=False)
    assert (request.prompt_ids, request.completion_ids) == ([1], [2, 3])
    assert "completion_ids" not in request.extra_info


@pytest.mark.parametrize(("limit", "shown"), [(None, "x" * 100), (60, "x" * 59 + "…"), (200, "x" * 100)])
def test_table_shows_as_much_of_a_text_as_there_is_room_for(limit, shown):
    groups = [[build_request({"completion": "x" * 100}, 0, "")]]
    outcomes = label_outcomes(groups, [[ScoreResult(id="test-0", valid=True, score=1.0)]], in_groups=False)
    text = to_text(build_table("r", outcomes, limit))
    assert [part for part in text.split() if part.startswith("x")] == [shown]
