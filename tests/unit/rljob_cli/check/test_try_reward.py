"""The requests that `rljob test-reward` sends, and the labels of their results."""

from __future__ import annotations

import pytest

from rljob_api.errors import UserError
from rljob_api.wire.scores import ScoreResult
from rljob_cli.check.samples import SampleBuilder
from rljob_cli.check.try_reward import (
    Outcome,
    _read_answer,
    _read_rows,
    build_groups,
    build_table,
    collect_output,
    label_outcomes,
    reward_children,
    sum_up,
)
from rljob_cli.tables import to_text
from tests.support.job_simulation import make_job


def builder(**data):
    return SampleBuilder(make_job(data={"train": {"source": "/d.jsonl", "prompt": "q", **data}}))


ROWS = [
    {"completion": "a", "prompt": "1+1?", "answer": "2"},
    {"completion": "b", "prompt": "2+2?", "answer": "4"},
    {"completion": "c", "prompt": "1+1?", "answer": "2", "num_tokens": 7},
]


def completions(groups):
    return [[request.completion for request in group] for group in groups]


def test_rows_with_the_same_prompt_form_a_group_if_the_reward_scores_groups():
    groups = build_groups(ROWS, builder(), in_groups=True)
    assert completions(groups) == [["a", "c"], ["b"]]
    assert groups[0][1].extra_info["num_tokens"] == 7
    assert completions(build_groups(ROWS, builder(), in_groups=False)) == [["a"], ["b"], ["c"]]


def test_column_group_decides_the_group_of_a_row():
    rows = [{**row, "group": number} for row, number in zip(ROWS, (1, 1, 2), strict=True)]
    groups = build_groups(rows, builder(), in_groups=True)
    assert completions(groups) == [["a", "b"], ["c"]]
    assert "group" not in groups[0][0].extra_info
    assert build_groups(rows, builder(), in_groups=False)[0][0].extra_info["group"] == 1, (
        "otherwise it is any other column"
    )


def test_file_is_read_as_data_is(tmp_path):
    """`rljob init` copies texts of the data into it: U+2028, which ends a line elsewhere, does not end one of JSON."""
    file = tmp_path / "rows.jsonl"
    file.write_bytes('\ufeff{"completion": "a\u2028b", "answer": NaN}\r\n\r\n{"completion": ""}'.encode())
    assert _read_rows([], None, "", file) == [{"completion": "a\u2028b", "answer": None}, {"completion": ""}]


@pytest.mark.parametrize(("name", "text"), [("rows.csv", "completion\na\n"), ("rows.json", '[{"completion": "a"}]')])
def test_file_may_have_each_format_of_data(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert _read_rows([], None, "", tmp_path / name) == [{"completion": "a"}]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"completion": 4}', r"rows.jsonl:2: must have the text `completion`"),
        ('{"completion": "\\ud800"}', r"rows.jsonl:2: has \\ud800, half of a character"),
        (
            '{"completion": "", "prompt": [{"role": "user"}]}',
            r"rows.jsonl:2: `prompt` must be a string or a list of {rol",
        ),
        ('{"completion": "", "prompt_ids": ["1"]}', r"rows.jsonl:2: `prompt_ids` must be a list of whole numbers"),
        ('["completion"]', r"rows.jsonl:2: each line must be a JSON object, got list"),
    ],
)
def test_wrong_row_of_a_file_is_named(tmp_path, row, message):
    (tmp_path / "rows.jsonl").write_text(f'{{"completion": "a"}}\n{row}\n')
    with pytest.raises(UserError, match=message):
        _read_rows([], None, "", tmp_path / "rows.jsonl")


def test_weighted_sum_is_of_all_rewards_of_a_row():
    """In the order of the rows, also where a reward scores groups."""
    requests = [each for [each] in build_groups(ROWS, builder(), in_groups=False)]
    results = [ScoreResult(id="x", valid=True, score=score) for score in (1.0, 2.0, 3.0)]
    alone = [Outcome("", *pair) for pair in zip(requests, results, strict=True)]
    none = ScoreResult(id="x", valid=False, reason="abstained")
    late = ScoreResult(id="x", valid=False, reason="timeout")
    found = {
        "a": alone,
        "b": [Outcome("", requests[i], result) for i, result in ((2, none), (0, results[2]), (1, late))],
    }
    assert sum_up({"a": 1.0, "b": -2.0}, found) == [-5.0, None, 3.0]


@pytest.mark.parametrize(
    ("answer", "given", "read"), [('{"a": 1}', '{"a": 2}', {"a": 2}), ("4", "5", 5), ('"4"', "5", "5")]
)
def test_answer_has_the_type_of_the_datas_answers(tmp_path, answer, given, read):
    (tmp_path / "d.jsonl").write_text(f'{{"q": "x", "a": {answer}}}\n')
    job = make_job(data={"train": {"source": str(tmp_path / "d.jsonl"), "prompt": "q", "answer": "a"}})
    assert _read_answer(job, given) == read
    (tmp_path / "d.jsonl").unlink()
    assert _read_answer(job, given) == given, "the data are elsewhere"


def test_samples_are_numbered_within_their_groups():
    groups = build_groups(ROWS, builder(), in_groups=True)
    results = [[ScoreResult(id=request.id, valid=True, score=0.0) for request in group] for group in groups]
    assert [outcome.label for outcome in label_outcomes(groups, results, in_groups=True)] == ["1.1", "1.2", "2.1"]


def test_rows_keep_their_numbers_without_those_that_a_teacher_does_not_teach():
    _, second, third = build_groups(ROWS, builder(), in_groups=False)
    results = [[ScoreResult(id=request.id, valid=True, score=0.0)] for [request] in (second, third)]
    assert [outcome.label for outcome in label_outcomes([second, third], results, in_groups=False)] == ["2", "3"]


def test_rows_may_have_token_ids_for_rewards_that_read_them():
    [[request]] = build_groups(
        [{"completion": "a", "prompt_ids": [1], "completion_ids": [2, 3]}], builder(), in_groups=False
    )
    assert (request.prompt_ids, request.completion_ids) == ([1], [2, 3])
    assert "completion_ids" not in request.extra_info


@pytest.mark.parametrize(("limit", "shown"), [(None, "x" * 100), (60, "x" * 59 + "…"), (200, "x" * 100)])
def test_table_shows_as_much_of_a_text_as_there_is_room_for(limit, shown):
    groups = [[builder().build_row("test-0", {"completion": "x" * 100}, 0)]]
    outcomes = label_outcomes(groups, [[ScoreResult(id="test-0", valid=True, score=1.0)]], in_groups=False)
    text = to_text(build_table("r", outcomes, limit))
    assert [part for part in text.split() if part.startswith("x")] == [shown]


def test_table_shows_an_answer_that_is_an_object_as_json():
    groups = [[builder().build_row("test-0", {"completion": "x", "answer": {"ok": True}}, 0)]]
    outcomes = label_outcomes(groups, [[ScoreResult(id="test-0", valid=True, score=1.0)]], in_groups=False)
    assert '{"ok": true}' in to_text(build_table("r", outcomes))


def test_model_of_a_reward_runs_next_to_its_server_where_there_is_no_trainer():
    reward = {"name": "rm", "model": {"source": "/m", "placement": "trainer"}}
    job = make_job(rollout={"placement": "trainer"}, rewards=[reward])
    [deployment] = [child for child in reward_children(job, job.spec.rewards[0]) if child["kind"] == "Deployment"]
    [sidecar] = deployment["spec"]["template"]["spec"]["initContainers"]
    assert sidecar["name"] == "vllm"


def test_what_a_program_printed_stands_without_the_lines_of_its_server(tmp_path):
    lines = [
        "2026-11-28 15:50:35,434 WARNING not enforced here: uid: no other user can reach python",
        "2026-11-28 15:50:35,444 INFO runner runner (run) on http://127.0.0.1:1",
        "hello INFO",
        "2026-11-28 15:50:36,018 WARNING a call was slow",
    ]
    (tmp_path / "a-agent-runner-0.log").write_text("\n".join(lines))
    (tmp_path / "a-head-0.log").write_text("of the head")
    assert collect_output(tmp_path, "a-agent-*.log") == "\n".join([lines[0], *lines[2:]])


def test_a_file_of_rows_that_does_not_exist_is_answered_with_the_nearest_name(tmp_path):
    (tmp_path / "completions.jsonl").touch()
    with pytest.raises(UserError, match=r"completion\.jsonl not found; did you mean completions\.jsonl\?"):
        _read_rows([], None, "", tmp_path / "completion.jsonl")
