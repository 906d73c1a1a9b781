"""Samples of checks are those that the trainer would send."""

import pytest

from rljob_cli.check.samples import SampleBuilder, load_job_tokenizer
from tests.support.job_simulation import make_job
from tests.support.model_folder import write_model

TRAIN = {"source": "/d.jsonl", "prompt": "question", "answer": "final"}
ASKED, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}


def build(row, data=None, **spec):
    job = make_job(data={"train": TRAIN, **(data or {})}, **spec)
    return SampleBuilder(job).build_row("test-0", {"prompt": "2+2?", "completion": "4", **row}, 0)


def test_prompt_is_made_by_the_data_settings():
    assert build({}).prompt == [ASKED], "TRL's functions index messages"
    assert build({}, data={"format": "text"}).prompt == "2+2?"
    system = {"role": "system", "content": "Count."}
    assert build({"unit": "m"}, data={"template": "{prompt} in {unit}", "systemPrompt": "Count."}).prompt == [
        system,
        {"role": "user", "content": "2+2? in m"},
    ]
    assert build({}, data={"template": "{prompt} in {unit}"}).prompt == [ASKED], "a reward may not need the column"


def test_row_has_the_columns_and_the_data_source_of_training():
    request = build({"answer": "4", "level": 2, "data_source": "gsm8k"})
    assert (request.ground_truth, request.answer_column, request.data_source) == ("4", "final", "gsm8k")
    assert request.extra_info == {
        "index": 0,
        "level": 2,
        "data_source": "gsm8k",
        "split": "train",
        "truncated": False,
    }
    assert build({"final": "5"}).ground_truth == "5", "the data's own column"


def test_nested_answer_is_read_as_in_training():
    """verl's rows have it in reward_model.ground_truth."""
    data = {"train": {**TRAIN, "answer": "reward_model.ground_truth"}}
    row = {"reward_model": {"style": "rule", "ground_truth": {"target": 4}}, "answer": "the long solution"}
    request = build(row, data)
    assert (request.ground_truth, request.answer_column) == ({"target": 4}, "")
    assert request.extra_info["answer"] == "the long solution", "a column as any other"
    assert build({"answer": "4"}, data).ground_truth == "4", "where the row has no such column"


def test_prompt_may_be_in_the_column_of_the_data():
    assert build({"prompt": None, "question": "3+3?"}).prompt == [{"role": "user", "content": "3+3?"}]


def test_tokens_are_counted_by_the_models_tokenizer(tmp_path):
    job = make_job(data={"train": TRAIN}, model={"source": str(write_model(tmp_path))})
    samples = SampleBuilder(job, load_job_tokenizer(job))
    row = {"completion": "four"}
    assert samples.build_row("t", row, 0).extra_info["num_tokens"] == 5, "with eos_token"
    assert samples.build_row("t", row | {"num_tokens": 9}, 0).extra_info["num_tokens"] == 9
    assert load_job_tokenizer(make_job(data={"train": TRAIN}, model={"source": "/missing"})) is None


@pytest.mark.parametrize(("agent", "end"), [({"type": "loop", "user": {"function": {"inline": "x"}}}, "user")])
def test_agent_gets_a_conversation_of_one_answer(agent, end):
    request = build({}, agent=agent)
    assert request.extra_info["messages"] == [ASKED, ANSWER]
    assert request.extra_info["turns"] == [{"text": "4", "reward": None, "tool_calls": []}]
    assert (request.extra_info["state"], request.extra_info["end"]) == ({}, end)
    assert (request.whole.text, request.whole.messages) == ("4", [ANSWER])
    assert build({"state": {"tries": 2}}, agent=agent).extra_info["state"] == {"tries": 2}, "a recorded episode"
