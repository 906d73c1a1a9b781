"""What a row must have, reported once per field."""

import pytest

from rljob_api.manifest.job_sections import Data, GivenSource, TrainSource
from rljob_inputs.data.columns import fill_template, find_problems, read_answer
from rljob_inputs.data.rows import Row
from rljob_inputs.findings import InputError

SOURCE = TrainSource(source="./d.jsonl", prompt="q", answer="reward_model.ground_truth")


def problems(values, **data):
    row = Row(values, 0, "d.jsonl:1")
    return {p.path: p.message for p in find_problems(Data(train=SOURCE, **data), SOURCE, row, "spec.data.train")}


def test_a_complete_row_has_no_problem():
    assert not problems({"q": "x", "reward_model": {"ground_truth": 1}}, template="{prompt} {q} {{x}}")


def test_all_fields_are_reported_at_once_with_near_names():
    found = problems({"p": 1, "reward_model": {"groundtruth": 1}}, template="{prompt} {unit}")
    assert found == {
        "spec.data.train.prompt": "d.jsonl:1 has no column q; it has p, reward_model, reward_model.groundtruth",
        "spec.data.train.answer": "d.jsonl:1 has no column reward_model.ground_truth; it has p, reward_model, "
        "reward_model.groundtruth; did you mean reward_model.groundtruth?",
        "spec.data.template": "{unit} is not a column; d.jsonl:1 has p, reward_model "
        "(write {{unit}} for literal braces)",
    }


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "the prompt is null; remove the row, or fill it in"),
        (3, "got int"),
        ([], "got an empty list"),
        ([{"content": "x"}], "got list"),
        ([{"from": "human", "value": "x"}], "of {from, value}, as ShareGPT; rename the keys to role and content"),
    ],
)
def test_a_prompt_is_text_or_messages(prompt, message):
    found = problems({"q": prompt, "reward_model": {"ground_truth": 1}})
    assert message in found["spec.data.train.prompt"]


def test_template_keeps_other_braces_and_rejects_unknown_names():
    row = Row({"q": "x"}, 0, "d.jsonl:1")
    assert fill_template(r"\boxed{} {q} {{q}} {1}", row.values, row) == r"\boxed{} x {q} {1}"
    with pytest.raises(InputError, match="qq"):
        fill_template("{qq}", row.values, row)


GIVEN = "spec.data.warmStart"
ANSWER = {"role": "assistant", "content": "4", "reasoning_content": "well"}


@pytest.mark.parametrize(
    ("answer", "messages"),
    [
        pytest.param("4", [{"role": "assistant", "content": "4"}], id="a text"),
        pytest.param(4, [{"role": "assistant", "content": "4"}], id="a number"),
        pytest.param([ANSWER, {"role": "tool", "content": "t"}, ANSWER], None, id="messages"),
    ],
)
def test_answer_of_a_given_conversation_is_messages(answer, messages):
    source = GivenSource(source="./d.jsonl", prompt="q", answer="a")
    row = Row({"q": "2 + 2?", "a": answer}, 0, "d.jsonl:1")
    assert read_answer(source, row, GIVEN) == (messages or answer)


def test_a_given_conversation_in_one_column_keeps_all_of_its_last_message():
    source = GivenSource(source="./d.jsonl", prompt="messages", answer="messages")
    row = Row({"messages": [{"role": "user", "content": "?"}, ANSWER]}, 0, "d.jsonl:1")
    assert read_answer(source, row, GIVEN) == [ANSWER]


@pytest.mark.parametrize("answer", [None, [], [{"role": "user", "content": "?"}], {"content": "4"}])
def test_a_given_conversation_without_an_answer_is_a_problem(answer):
    source = GivenSource(source="./d.jsonl", prompt="q", answer="a")
    row = Row({"q": "2 + 2?", "a": answer}, 0, "d.jsonl:1")
    [problem] = find_problems(Data(train=SOURCE, warm_start=source), source, row, GIVEN)
    assert problem.path == "spec.data.warmStart.answer"
    assert "d.jsonl:1: the answer must be a text, or messages that end with the assistant's" in problem.message


@pytest.mark.parametrize("content", ["", None])
@pytest.mark.parametrize("name", ["q", "a"])
def test_an_empty_answer_of_a_given_conversation_is_a_problem(name, content):
    answer = {"role": "assistant", "content": content, "tool_calls": None}
    user = {"role": "user", "content": "?"}
    values = {"q": [user], "a": content or ""} if name == "a" else {"q": [user, answer]}
    source = GivenSource(source="./d.jsonl", prompt="q", answer=name)
    [problem] = find_problems(Data(train=SOURCE, warm_start=source), source, Row(values, 0, "d.jsonl:1"), GIVEN)
    assert problem.message == "d.jsonl:1: the answer is empty; fill it in, or remove the row"
    answer["tool_calls"] = [{"function": {"name": "f"}}]
    values["a"] = [answer]
    assert not [*find_problems(Data(train=SOURCE, warm_start=source), source, Row(values, 0, "d.jsonl:1"), GIVEN)]


def test_a_given_conversation_needs_a_column_of_answers():
    source = GivenSource(source="./d.jsonl", prompt="messages")
    row = Row({"messages": "?"}, 0, "d.jsonl:1")
    [problem] = find_problems(Data(train=SOURCE, warm_start=source), source, row, GIVEN)
    assert problem.message == "d.jsonl:1 has no column answer; it has messages"
