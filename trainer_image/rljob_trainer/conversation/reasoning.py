"""Reasoning in the text of an answer: <think>...</think> at its start, as DeepSeek-R1 and Qwen 3 write it. Pure.

Some templates end the prompt with <think>; then the answer begins within the reasoning. Reasoning with other marks, as
of gpt-oss, is content.
"""

START, END = "<think>", "</think>"


def find_opening(prompt_text: str) -> str:
    """Return the <think> with which the prompt ends, with the white space after it; empty if it ends otherwise."""
    return prompt_text[prompt_text.rindex(START) :] if prompt_text.rstrip().endswith(START) else ""


def split_reasoning(text: str) -> tuple[str, str]:
    """Return the reasoning with its marks and the white space around them, and the rest. All of a text whose reasoning
    does not end is reasoning."""
    if not text.lstrip().startswith(START):
        return "", text
    _, mark, rest = text.partition(END)
    rest = rest.lstrip()
    return (text[: len(text) - len(rest)], rest) if mark else (text, "")


def drop_reasoning(text: str) -> str:
    return split_reasoning(text)[1]


def strip_marks(reasoning: str) -> str:
    """Return the reasoning alone."""
    return reasoning.strip().removeprefix(START).removesuffix(END).strip()
