"""Rows to prompts, and the order of their use."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.errors import UserError
from rljob_api.manifest.job_sections import Data, DataSource
from rljob_trainer.episodes.prompts import Cursor, build_prompt, epoch_order, fill_template, load_prompts, take


class Tokenizer:
    """One token per character; the chat template writes one line per message."""

    chat_template = "yes"

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [ord(c) for c in text]}

    def apply_chat_template(self, messages, *, add_generation_prompt, tokenize):
        assert add_generation_prompt
        assert not tokenize
        return "".join(f"<{m['role']}>{m['content']}\n" for m in messages) + "<assistant>"


def text_of(prompt):
    return "".join(map(chr, prompt.token_ids))


def prompt_of(row, *, split="train", **data):
    source = DataSource(source="./d.jsonl", prompt="q", answer="a")
    return build_prompt(Data(train=source, **data), source, row, 0, Tokenizer(), split=split)


@given(
    num_rows=st.integers(1, 30),
    counts=st.lists(st.integers(1, 12), min_size=1, max_size=10),
    seed=st.integers(0, 2**31),
    shuffle=st.booleans(),
)
def test_each_epoch_uses_every_row_once(num_rows, counts, seed, shuffle):
    cursor, taken = Cursor(), []
    for count in counts:
        rows, cursor = take(num_rows, cursor, count, seed=seed, shuffle=shuffle)
        assert len(rows) == count
        taken += rows
    for epoch in range(len(taken) // num_rows):
        assert sorted(taken[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))
    assert cursor == Cursor(*divmod(sum(counts), num_rows)), "the cursor alone determines where to continue"


def test_order_depends_on_epoch_and_seed():
    orders = [tuple(epoch_order(50, epoch, seed=seed, shuffle=True)) for seed in (0, 1) for epoch in (0, 1)]
    assert len(set(orders)) == 4
    assert orders[0] == tuple(epoch_order(50, 0, seed=0, shuffle=True))


def test_text_is_the_filled_in_template():
    prompt = prompt_of({"q": "1 + 1", "a": 2, "unit": "kg"}, format="text", template="{prompt} in {unit}?")
    assert text_of(prompt) == prompt.prompt == "1 + 1 in kg?"
    assert prompt.ground_truth == 2
    assert prompt.extra_info == {"unit": "kg", "index": 0, "split": "train"}


def test_chat_adds_a_system_message_only_if_configured():
    assert text_of(prompt_of({"q": "hi", "a": 1})) == "<user>hi\n<assistant>"
    assert text_of(prompt_of({"q": "hi", "a": 1}, system_prompt="be brief")).startswith("<system>be brief\n<user>hi")
    assert text_of(prompt_of({"q": "hi", "a": 1}, system_prompt="")).startswith("<system>\n<user>hi"), "no default"


def test_prompt_of_messages_is_unchanged():
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    prompt = prompt_of({"q": messages, "a": 1})
    assert prompt.prompt == messages
    with pytest.raises(UserError, match="set it to chat"):
        prompt_of({"q": messages, "a": 1}, format="text")


def test_nested_columns_and_verls_extra_info_are_read():
    source = DataSource(source="hf://org/d", prompt="q", answer="reward_model.ground_truth")
    row = {"q": "x", "reward_model": {"ground_truth": "7"}, "extra_info": {"level": 3}}
    prompt = build_prompt(Data(train=source), source, row, 4, Tokenizer(), split="train")
    assert (prompt.ground_truth, prompt.data_source) == ("7", "org/d")
    assert prompt.extra_info["level"] == 3
    assert prompt.extra_info["index"] == 4


def test_missing_column_error_lists_existing_columns():
    with pytest.raises(UserError, match=r"spec.data.train.prompt: column q not found; .*question, a"):
        prompt_of({"question": "x", "a": 1})
    with pytest.raises(UserError, match=r"spec.data.eval.answer: column a not found"):
        prompt_of({"q": "x"}, split="test")


def test_template_keeps_other_braces_and_rejects_unknown_names():
    assert fill_template(r"\boxed{} {q} {{q}} {1}", {"q": "x"}) == r"\boxed{} x {q} {1}"
    with pytest.raises(UserError, match="qq"):
        fill_template("{qq}", {"q": "x"})


def test_long_prompts_are_skipped_and_rows_keep_their_index(tmp_path):
    file = tmp_path / "d.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": "x" * n, "answer": n}) for n in (1, 9, 2)) + "\n\n")
    source = DataSource(source="./d.jsonl")
    data = Data(train=source, format="text", max_prompt_tokens=5)
    prompts = load_prompts(data, source, str(file), Tokenizer(), split="train")
    assert [prompt.index for prompt in prompts] == [0, 2]
    file.write_text(json.dumps({"prompt": "x" * 9, "answer": 1}))
    with pytest.raises(UserError, match=r"maxPromptTokens is 5, but the shortest prompt .* has 9"):
        load_prompts(data, source, str(file), Tokenizer(), split="train")


def test_parquet_and_folders_are_read_in_order(tmp_path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["b"], "answer": ["1"]}), tmp_path / "b.parquet")
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "answer": "0"}\n')
    source = DataSource(source="./d", limit=2)
    prompts = load_prompts(Data(train=source, format="text"), source, str(tmp_path), Tokenizer(), split="train")
    assert [prompt.prompt for prompt in prompts] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "message"),
    [('{"a": 1}\n{', r":2: not JSON"), ("[1]", r":1: each line must be a JSON object, got list"), ("", "has no rows")],
)
def test_broken_file_error_contains_the_line(tmp_path, text, message):
    file = tmp_path / "d.jsonl"
    file.write_text(text)
    source = DataSource(source="./d.jsonl", prompt="a", answer=None)
    with pytest.raises(UserError, match=message):
        load_prompts(Data(train=source, format="text"), source, str(file), Tokenizer(), split="train")


def test_missing_file_is_a_user_error(tmp_path):
    source = DataSource(source="./d.jsonl")
    with pytest.raises(UserError, match="no such file, and no folder"):
        load_prompts(Data(train=source), source, str(tmp_path / "no"), Tokenizer(), split="train")
