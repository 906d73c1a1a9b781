"""Given conversations as rows: which tokens train, what is refused, and the order."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from rljob_inputs.data.prompts import PromptSet
from rljob_inputs.findings import InputError
from rljob_inputs.prompts import Prompt
from rljob_trainer.feed import given_rows
from rljob_trainer.feed.given_rows import GivenRows, build_given
from tests.support.chat_templates import FAMILIES, build_tokenizer
from tests.support.driver_harness import make_job

ASK = {"role": "user", "content": "What is 2 + 2?"}
MORE = {"role": "user", "content": "and 2 + 3?"}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
}


def say(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def build(
    *conversations: list[Any], family: str = "smollm2", limit: int | None = None, tools: Any = None, **spec: Any
) -> GivenRows:
    """Each conversation: messages, or a prompt and its answer as texts. The last message is the answer."""
    tokenizer = copy.deepcopy(build_tokenizer())
    tokenizer.chat_template, tokenizer.eos_token = FAMILIES[family], "<|endoftext|>"
    prompts = {}
    for index, conversation in enumerate(conversations):
        *prompt, answer = conversation
        text = prompt[0] if isinstance(answer, str) else prompt
        given = [say(answer)] if isinstance(answer, str) else [answer]
        extra = {} if tools is None else {"tools": tools}
        prompts[index] = Prompt(index, text, tokenizer(text)["input_ids"] if isinstance(text, str) else [1], given)
        prompts[index].extra_info.update(extra)
    sections = {
        "data": {"warmStart": {"source": "/w.jsonl"}, "shuffle": False, **spec.pop("data", {})},
        "schedule": {"warmStart": {"steps": 2}, "promptsPerStep": 2, **spec},
    }
    return build_given(make_job(**sections).spec, PromptSet(len(prompts), prompts), tokenizer, limit)


def trained(given: GivenRows, number: int = 0) -> list[str]:
    """The trained text of each row of a conversation."""
    rows = given.conversations[number][1]
    for row in rows:
        assert (row.advantages == row.loss_mask).all()
        assert not row.loss_mask[0], "nothing predicts the first token"
    return [build_tokenizer().decode(row.token_ids[row.loss_mask]) for row in rows]


def whole(given: GivenRows) -> list[str]:
    return [build_tokenizer().decode(row.token_ids) for row in given.conversations[0][1]]


@pytest.mark.parametrize("family", ["smollm2", "qwen25", "llama3"])
def test_each_answer_of_a_conversation_trains_up_to_its_end(family: str) -> None:
    given = build([ASK, say("It is 4."), MORE, say("That is 5.")], family=family)
    end = "<|eot_id|>" if family == "llama3" else "<|im_end|>"
    assert trained(given) == [f"It is 4.{end}That is 5.{end}"]
    [text] = whole(given)
    tokenizer = copy.deepcopy(build_tokenizer())
    tokenizer.chat_template = FAMILIES[family]
    messages = [ASK, say("It is 4."), MORE, say("That is 5.")]
    assert tokenizer.apply_chat_template(messages, tokenize=False).startswith(text)


def test_an_answer_whose_reasoning_the_template_drops_later_has_a_row_of_its_own() -> None:
    given = build(
        [ASK, say("<think>\nwell\n</think>\n\n4."), MORE, say("<think>\nwell, well\n</think>\n\n5.")],
        family="qwen3",
    )
    assert trained(given) == [
        "<think>\nwell\n</think>\n\n4.<|im_end|>",
        "<think>\nwell, well\n</think>\n\n5.<|im_end|>",
    ]
    assert "<think>\nwell\n" not in whole(given)[1]


def test_calls_train_and_their_tools_and_results_are_context() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [ASK, say("", tool_calls=[call]), {"role": "tool", "content": "3"}, say("It is 3.")]
    given = build(messages, family="qwen25", tools=[TOOL])
    [text] = trained(given)
    assert text.count("<|im_end|>") == 2
    assert '"name": "add"' in text
    assert text.endswith("It is 3.<|im_end|>")
    assert "Adds." in whole(given)[0]
    assert "tool_response" not in text


def test_text_trains_on_the_answer_and_the_end_of_sequence() -> None:
    given = build(["Question: 2 + 2?\nAnswer:", " 4"], data={"format": "text"})
    assert trained(given) == [" 4<|endoftext|>"]
    assert whole(given) == ["Question: 2 + 2?\nAnswer: 4<|endoftext|>"]


def test_tools_that_are_no_functions_name_the_row() -> None:
    with pytest.raises(InputError, match=r"spec.data.warmStart: row 1: .*tools must be functions"):
        build([ASK, say("4.")], tools=["add"])


def test_a_template_that_writes_an_answer_otherwise_than_it_generates_is_refused() -> None:
    template = FAMILIES["smollm2"] + "{% if add_generation_prompt %}<think>{% endif %}"
    FAMILIES["thinks"] = template
    try:
        with pytest.raises(InputError, match=r"spec.data.warmStart: row 1: the chat template writes an answer"):
            build([ASK, say("4.")], family="thinks")
    finally:
        del FAMILIES["thinks"]


def test_long_conversations_are_left_out_and_an_error_if_all_are(caplog: pytest.LogCaptureFixture) -> None:
    long, short = [ASK, say("4 " * 90)], [ASK, say("4.")]
    given = build(long, short, limit=120)
    assert [number for number, _ in given.conversations] == [1]
    assert "spec.data.warmStart: 1 conversations have more than 120 tokens" in caplog.text
    with pytest.raises(InputError, match=r"spec.data.warmStart.source: all 1 conversations have more than 120 tokens"):
        build(long, limit=120)


def test_rows_follow_in_epochs_and_by_position_alone() -> None:
    given = build(*([ASK, say(f"{i}.")] for i in range(3)))
    assert given.take(0, 2)[0] + given.take(2, 2)[0] == [0, 1, 2, 0]
    shuffled = build(*([ASK, say(f"{i}.")] for i in range(3)), data={"shuffle": True})
    drawn = shuffled.take(0, 9)[0]
    assert [sorted(drawn[i : i + 3]) for i in (0, 3, 6)] == [[0, 1, 2]] * 3
    assert shuffled.take(4, 3)[0] == drawn[4:7]


def test_order_of_an_epoch_is_drawn_once_for_an_update(monkeypatch):
    """Such an order has all rows, and an update may have thousands."""
    given, drawn = build(*([ASK, say(f"{i}.")] for i in range(3))), []
    monkeypatch.setattr(given_rows, "epoch_order", lambda size, epoch, **_: drawn.append(epoch) or np.arange(size))
    assert given.take(1, 7)[0] == [1, 2, 0, 1, 2, 0, 1]
    assert drawn == [0, 1, 2]


def test_no_more_conversations_are_read_than_the_steps_train() -> None:
    given = build(*([ASK, say(f"{i}.")] for i in range(9)))
    assert [number for number, _ in given.conversations] == [0, 1, 2, 3]
