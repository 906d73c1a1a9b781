"""Writes the hidden numbers that the guess example trains on: `python examples/make_numbers.py`.

The result is in git (guess/data). A question names a range of 7 numbers; which one is meant says only the user, after a
wrong answer. Each prompt begins with a conversation: without it, this model writes sentences that the limit cuts
off, and has no second turn to learn from. Invariant: no held-out range is trained on, and no range overlaps the shown
one; of each held-out range, each number is meant once.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import NamedTuple

WIDTH = 7
"""Three guesses suffice if each one halves what is left."""
FIRST = range(20, 90)
"""Values of the first numbers of the ranges."""
NUM_HELD_OUT_RANGES = 10
NUM_TRAIN = 256
SEED = 0
SHOWN_LOW, SHOWN_TURNS = 11, ("14", "Higher.", "16", "Lower.", "15")
"""Numbers of the conversation that each prompt shows: the first number of its range, the answers and the user's
replies."""


class Question(NamedTuple):
    low: int
    hidden: int


def make_questions() -> tuple[list[Question], list[Question]]:
    """Return the questions to train on and the held-out ones. All differ."""
    numbers = random.Random(SEED)
    first = numbers.sample(FIRST, len(FIRST))
    held_out, trained = first[:NUM_HELD_OUT_RANGES], first[NUM_HELD_OUT_RANGES:]
    all_of_train = [Question(low, low + place) for low in trained for place in range(WIDTH)]
    all_of_eval = [Question(low, low + place) for low in sorted(held_out) for place in range(WIDTH)]
    return numbers.sample(all_of_train, NUM_TRAIN), all_of_eval


def build_row(question: Question) -> str:
    messages = [{"role": "system", "content": "Reply with a number."}]  # the model's own system message is longer
    messages.append(ask(SHOWN_LOW))
    for index, text in enumerate(SHOWN_TURNS):
        messages.append({"role": "user" if index % 2 else "assistant", "content": text})
    messages.append(ask(question.low))
    return json.dumps({"messages": messages, "answer": str(question.hidden), "low": question.low}) + "\n"


def ask(low: int) -> dict[str, str]:
    return {"role": "user", "content": f"A number from {low} to {low + WIDTH - 1}?"}


def main() -> None:
    folder = Path(__file__).resolve().parent / "guess" / "data"
    folder.mkdir(exist_ok=True)
    for name, questions in zip(("train", "eval"), make_questions(), strict=True):
        (folder / f"{name}.jsonl").write_text("".join(map(build_row, questions)))


if __name__ == "__main__":
    main()
