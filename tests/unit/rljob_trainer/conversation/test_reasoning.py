"""Reasoning at the start of an answer."""

import pytest

from rljob_trainer.conversation.reasoning import drop_reasoning, find_opening, split_reasoning, strip_marks


@pytest.mark.parametrize(
    ("prompt", "opening"),
    [
        ("<|im_start|>assistant\n<think>\n", "<think>\n"),
        ("<think>x</think> <｜Assistant｜><think>", "<think>"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", ""),
        ("<think>\n<|im_start|>assistant\n", ""),
        ("", ""),
    ],
)
def test_the_end_of_a_prompt_may_open_reasoning(prompt, opening):
    assert find_opening(prompt) == opening


@pytest.mark.parametrize(
    ("text", "reasoning", "rest"),
    [
        ("<think>a</think>b", "a", "b"),
        ("\n<think>\na\n</think>\n\nb</think>\n", "a", "b</think>\n"),
        ("<think></think>", "", ""),
        ("<think>a", "a", ""),
        ("a<think>b</think>", "", "a<think>b</think>"),
        ("", "", ""),
    ],
)
def test_reasoning_and_the_rest_are_the_whole_text(text, reasoning, rest):
    first, second = split_reasoning(text)
    assert (first + second, second, drop_reasoning(text)) == (text, rest, rest)
    assert strip_marks(first) == reasoning
