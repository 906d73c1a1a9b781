"""What a row must have, reported once per field."""

import pytest

from rljob_api.manifest.job_sections import Data, TrainSource
from rljob_inputs.data.columns import fill_template, find_problems
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
