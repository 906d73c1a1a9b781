"""Rows to prompts: rendering, tokenizing, and what is left out."""

import json

import pytest

from rljob_api.manifest.job_sections import Data, TrainSource
from rljob_inputs.data.lengths import PromptLimit
from rljob_inputs.data.prompts import build_prompts, load_prompts, write_hint
from rljob_inputs.data.rows import Row
from rljob_inputs.findings import InputError


class Tokenizer:
    """One token per character; the chat template writes one line per message."""

    chat_template = "yes"

    def __call__(self, texts, add_special_tokens=True):
        return {"input_ids": [[ord(c) for c in text] for text in texts]}

    def apply_chat_template(self, messages, *, add_generation_prompt, tokenize, **arguments):
        assert add_generation_prompt
        assert not tokenize
        return "".join(f"<{m['role']}>{m['content']}\n" for m in messages) + "<assistant>" + arguments.get("end", "")


def text_of(prompt):
    return "".join(map(chr, prompt.token_ids))


def prompt_of(row, *, split="train", position=0, source=None, tokenizer=None, **data):
    source = source or TrainSource(source="./d.jsonl", prompt="q", answer="a")
    rows = [Row(row, position, f"d.jsonl:{position + 1}")]
    (prompt,) = build_prompts(Data(train=source, **data), source, rows, tokenizer or Tokenizer(), split=split)
    return prompt


def load(path, limit=None, **fields):
    source = TrainSource(source="./d", **fields)
    data = Data(train=source, format="text")
    limit = PromptLimit(limit, "rollout.maxModelLen 8 - rollout.sampling.maxTokens 3")
    return load_prompts(data, source, str(path), Tokenizer(), split="train", limit=limit)


def test_text_is_the_filled_in_template():
    prompt = prompt_of({"q": "1 + 1", "a": 2, "unit": "kg"}, format="text", template="{prompt} in {unit}?")
    assert text_of(prompt) == prompt.prompt == "1 + 1 in kg?"
    assert prompt.ground_truth == 2
    assert prompt.extra_info == {"q": "1 + 1", "unit": "kg", "index": 0, "split": "train"}
    assert prompt.answer_column == "a"


def test_split_of_the_row_is_kept():
    assert prompt_of({"q": "1 + 1", "a": "2", "extra_info": {"split": "hard"}}).extra_info["split"] == "hard"


def test_chat_adds_a_system_message_only_if_configured():
    assert text_of(prompt_of({"q": "hi", "a": 1})) == "<user>hi\n<assistant>"
    assert text_of(prompt_of({"q": "hi", "a": 1}, system_prompt="be brief")).startswith("<system>be brief\n<user>hi")
    assert text_of(prompt_of({"q": "hi", "a": 1}, system_prompt="")).startswith("<system>\n<user>hi"), "no default"


def test_chat_has_the_variables_of_the_job():
    arguments = {"end": "<think></think>"}
    assert text_of(prompt_of({"q": "hi", "a": 1}, chat_template_arguments=arguments)).endswith(
        "<assistant>" + "<think></think>"
    )
    assert text_of(prompt_of({"q": "hi", "a": 1}, format="text", chat_template_arguments=arguments)) == "hi"


def test_prompt_of_messages_is_unchanged():
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    prompt = prompt_of({"q": messages, "a": 1})
    assert prompt.prompt == messages
    with pytest.raises(InputError, match="set it to chat"):
        prompt_of({"q": messages, "a": 1}, format="text")


CONVERSATION = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": [{"type": "text", "text": "It is "}, {"type": "text", "text": "2"}]},
]


def test_a_conversation_that_ends_with_the_answer_is_refused():
    """Every chat dataset for supervised training is one: the prompt would hold the answer."""
    with pytest.raises(InputError, match="the last message is the assistant's") as raised:
        prompt_of({"q": CONVERSATION, "a": "2"})
    assert raised.value.path == "spec.data.train.prompt"
    assert "d.jsonl:1: " in raised.value.message
    assert "set answer: q to use it as the answer" in raised.value.message
    with pytest.raises(InputError, match="the last message is the assistant's"):
        prompt_of({"q": CONVERSATION}, source=TrainSource(source="./d.jsonl", prompt="q", answer=None))


def test_the_last_message_is_the_answer_if_both_columns_are_one():
    source = TrainSource(source="./d.jsonl", prompt="q", answer="q")
    prompt = prompt_of({"q": CONVERSATION, "level": 1}, source=source)
    assert prompt.prompt == CONVERSATION[:1]
    assert text_of(prompt) == "<user>1 + 1?\n<assistant>"
    assert (prompt.ground_truth, prompt.answer_column) == ("It is 2", "")
    assert prompt.extra_info["level"] == 1
    with pytest.raises(InputError, match="must be the assistant's to be the answer, got 1, and the last is of user"):
        prompt_of({"q": CONVERSATION[:1]}, source=source)


def test_parts_of_text_are_text_and_other_parts_are_named():
    def ask(*parts):
        return prompt_of({"q": [{"role": "user", "content": list(parts)}], "a": 1})

    text = {"type": "text", "text": "What is this?"}
    assert text_of(ask(text, {"type": "text", "text": " Say it.", "image": None})) == (
        "<user>What is this? Say it.\n<assistant>"
    )
    for part in ({"type": "image_url", "image_url": {"url": "x"}}, {"type": "image"}, {"type": "input_audio"}):
        message = f"d.jsonl:1: a message has a part of type {part['type']}; only text trains, no images"
        with pytest.raises(InputError, match=message):
            ask(text, part)
    with pytest.raises(InputError, match="a part of type text without text"):
        ask({"type": "text", "text": None})


def test_nested_columns_and_verls_extra_info_are_read():
    source = TrainSource(source="hf://org/d", prompt="q", answer="reward_model.ground_truth")
    row = {"q": "x", "reward_model": {"ground_truth": "7"}, "extra_info": {"level": 3}}
    prompt = prompt_of(row, position=4, source=source)
    assert (prompt.ground_truth, prompt.data_source) == ("7", "org/d")
    assert prompt.extra_info["level"] == 3
    assert prompt.extra_info["index"] == 4


def test_data_source_is_the_setting_else_the_rows_column_else_the_files_name():
    row = {"q": "x", "a": 1, "data_source": "lighteval/MATH"}
    assert prompt_of(row).data_source == "lighteval/MATH", "as in verl's files, where rows may differ"
    fixed = TrainSource(source="./d.jsonl", prompt="q", answer="a", data_source="gsm8k")
    assert prompt_of(row, source=fixed).data_source == "gsm8k"
    assert prompt_of({"q": "x", "a": 1}).data_source == "d.jsonl"
    assert prompt_of({"q": "x", "a": 1, "data_source": None}).data_source == "d.jsonl"


@pytest.mark.parametrize("source", ["./math/d.jsonl", "/home/me/d.jsonl", "pvc://data/math/d.jsonl", "pvc://d.jsonl"])
def test_data_source_of_a_file_is_the_same_wherever_it_is(source):
    data = TrainSource(source=source, prompt="q", answer="a")
    assert prompt_of({"q": "x", "a": 1}, source=data).data_source == "d.jsonl"


def test_every_column_reaches_rewards_by_its_name():
    row = {"q": "x", "a": 1, "nested": {"b": 2}}
    assert prompt_of(row, template="<{prompt}>").extra_info["q"] == "x", "as it was before the template"
    assert (prompt_of(row).answer_column, "a" in prompt_of(row).extra_info) == ("a", False)
    part = TrainSource(source="./d.jsonl", prompt="prompt", answer="nested.b")
    prompt = prompt_of(row | {"prompt": "y"}, source=part)
    assert (prompt.ground_truth, prompt.answer_column, prompt.extra_info["nested"]) == (2, "", {"b": 2})
    assert "prompt" not in prompt.extra_info, "every form has a name for it"


@pytest.mark.parametrize("row", [{"q": "x", "a": 1, "index": 7}, {"q": "x", "a": 1, "extra_info": {"index": 7}}])
def test_column_index_of_the_data_is_kept(row):
    prompt = prompt_of(row, position=4)
    assert (prompt.index, prompt.extra_info["index"]) == (4, 7)


def test_missing_column_error_names_the_row_and_existing_columns():
    with pytest.raises(InputError, match=r"spec.data.train.prompt: d.jsonl:1 has no column q; it has question, a"):
        prompt_of({"question": "x", "a": 1})
    with pytest.raises(
        InputError,
        match=r"spec.data.eval.answer: d.jsonl:1 .* a; it has q; for rows without answers set",
    ):
        prompt_of({"q": "x"}, split="test")


def test_null_prompt_error_names_the_row():
    with pytest.raises(InputError, match=r"spec.data.train.prompt: d.jsonl:3: the prompt is null"):
        prompt_of({"q": None, "a": 1}, position=2)


def test_empty_prompt_error_names_the_row():
    with pytest.raises(InputError, match=r"d.jsonl:1: the prompt is empty"):
        prompt_of({"q": "", "a": 1}, format="text")


def test_chat_needs_a_template_that_renders():
    tokenizer = Tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(InputError, match=r"spec.data.format: is chat, but the model has no chat template"):
        prompt_of({"q": "x", "a": 1}, tokenizer=tokenizer)

    class Strict(Tokenizer):
        def apply_chat_template(self, messages, **options):
            raise RuntimeError("only user and assistant roles are supported")

    with pytest.raises(InputError, match="the chat template fails: RuntimeError: only user and assistant"):
        prompt_of({"q": "x", "a": 1}, tokenizer=Strict())


@pytest.mark.parametrize(("data_format", "adds"), [("chat", False), ("text", True)])
def test_special_tokens_are_added_once(data_format, adds):
    class Starting(Tokenizer):
        def __call__(self, texts, add_special_tokens=True):
            start = [2] if add_special_tokens else []
            return {"input_ids": [[*start, *ids] for ids in super().__call__(texts)["input_ids"]]}

    prompt = prompt_of({"q": "x", "a": 1}, tokenizer=Starting(), format=data_format)
    assert (prompt.token_ids[0] == 2) is adds, "a chat template writes them as text"


def test_long_prompts_are_left_out_and_rows_keep_their_index(tmp_path):
    file = tmp_path / "d.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": "x" * n, "answer": n}) for n in (1, 9, 2)) + "\n\n")
    prompts, table = load(file, 5)
    assert list(prompts.by_row) == [0, 2]
    assert prompts.num_rows == 3
    assert (table.num_too_long, table.min, table.max) == (1, 1, 9)
    file.write_text(json.dumps({"prompt": "x" * 9, "answer": 1}))
    with pytest.raises(InputError, match=r"all 1 prompts are too long: the shortest has 9 tokens, and the limit is 5"):
        load(file, 5)


def test_parquet_and_folders_are_read_in_order(tmp_path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["b"], "answer": ["1"]}), tmp_path / "b.parquet")
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "answer": "0"}\n')
    prompts, _ = load(tmp_path, limit=None)
    assert [prompt.prompt for prompt in prompts.by_row.values()] == ["a", "b"]


def test_data_without_rows_is_an_error(tmp_path):
    file = tmp_path / "d.jsonl"
    file.write_text("\n")
    with pytest.raises(InputError, match="has no rows"):
        load(file)


class OfOneMessage(Tokenizer):
    def __init__(self, *roles):
        self.roles = roles

    def apply_chat_template(self, messages, *, add_generation_prompt, tokenize, **arguments):
        [message] = messages
        if message["role"] not in self.roles:
            raise ValueError("no such role")
        return "" if self.roles[0] == "empty" else f"<{message['role']}>{message['content']}"


@pytest.mark.parametrize(
    ("format_", "roles", "text"),
    [
        ("text", (), "2 is right"),
        ("chat", ("user", "system"), "<system>2 is right"),
        ("chat", ("user",), "<user>2 is right"),
        ("chat", ("empty", "user", "system"), None),
    ],
)
def test_a_hint_is_a_text_or_a_message_of_its_own(format_, roles, text):
    source = TrainSource(source="./d.jsonl", prompt="q", answer="a")
    data, field = Data(train=source, format=format_), "spec.rewards[0].teacher.hint"
    prompt = prompt_of({"q": "1 + 1", "a": 2}, source=source)
    if text is None:
        with pytest.raises(InputError, match=r"teacher\.hint: the chat template writes no message alone"):
            write_hint(data, "{a} is right", prompt, OfOneMessage(*roles), field)
        return
    assert "".join(map(chr, write_hint(data, "{a} is right", prompt, OfOneMessage(*roles), field))) == text
