"""Writes the questions that the code-sandbox example trains on: `python examples/make_code_questions.py`.

The result is in git (code-sandbox/data). Each prompt begins with one example of each kind: without them, this model
never writes a call, and what is never sampled is not learned. Invariant: no held-out question is trained on.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

NUM_TRAIN, NUM_HELD_OUT = 128, 64
SEED = 0

Message = dict[str, str]


class Question(NamedTuple):
    kind: str
    text: str
    code: str
    answer: str


def ask_for_squares(numbers: random.Random) -> Question:
    a, b, c = numbers.sample(range(11, 100), 3)
    text = f"What is the sum of the squares of {a}, {b} and {c}?"
    return Question("squares", text, f"{a}**2 + {b}**2 + {c}**2", str(a**2 + b**2 + c**2))


def ask_for_digits(numbers: random.Random) -> Question:
    a, b = numbers.randrange(11, 100), numbers.randrange(11, 40)
    return Question(
        "digits", f"How many digits has {a} to the power of {b}?", f"len(str({a}**{b}))", f"{len(str(a**b))}"
    )


def ask_for_remainder(numbers: random.Random) -> Question:
    a, b = numbers.randrange(1000, 10000), numbers.randrange(101, 1000)
    return Question("remainder", f"What is the remainder of {a} divided by {b}?", f"{a} % {b}", str(a % b))


KINDS: tuple[Callable[[random.Random], Question], ...] = (ask_for_squares, ask_for_digits, ask_for_remainder)


def make_questions() -> tuple[list[Question], list[Question], list[Question]]:
    """Return the questions that each prompt shows, those to train on, and the held-out ones. All differ."""
    numbers = random.Random(SEED)
    num, made = len(KINDS) + NUM_TRAIN + NUM_HELD_OUT, dict[str, Question]()
    while len(made) < num:
        question = KINDS[len(made) % len(KINDS)](numbers)
        made.setdefault(question.text, question)
    all_questions = list(made.values())
    shown, others = all_questions[: len(KINDS)], all_questions[len(KINDS) :]
    return shown, others[:NUM_TRAIN], others[NUM_TRAIN:]


def build_row(shown: list[Question], question: Question) -> str:
    messages = [message for each in shown for message in build_example(each)]
    messages.append({"role": "user", "content": question.text})
    return json.dumps({"messages": messages, "answer": question.answer, "kind": question.kind}) + "\n"


def build_example(question: Question) -> list[Message]:
    """Return a question, the call, its result and the answer, as RLJob writes them for this model."""
    call = json.dumps({"name": "run_python", "arguments": {"code": question.code}})
    return [
        {"role": "user", "content": question.text},
        {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"},
        {"role": "user", "content": f"<tool_response>\n{question.answer}\n</tool_response>"},
        {"role": "assistant", "content": question.answer},
    ]


def main() -> None:
    folder = Path(__file__).resolve().parent / "code-sandbox" / "data"
    folder.mkdir(exist_ok=True)
    shown, *splits = make_questions()
    for name, questions in zip(("train", "eval"), splits, strict=True):
        (folder / f"{name}.jsonl").write_text("".join(build_row(shown, each) for each in questions))


if __name__ == "__main__":
    main()
