"""Writes the products that the calculator example trains on: `python examples/make_products.py`.

The result is in git (calculator/data). Each prompt begins with examples of calls: without them, this model never writes
one, and what is never sampled is not learned. Invariant: no held-out pair is trained on, neither as a * b nor as b * a.
"""

from __future__ import annotations

import json
import random
from itertools import combinations
from pathlib import Path

FACTORS = range(11, 100)
NUM_TRAIN, NUM_HELD_OUT = 128, 64
SEED = 0
SHOWN = ((12, 34), (55, 21), (47, 86))
"""Factors of the calls that each prompt shows."""

Pair = tuple[int, int]
Message = dict[str, str]


def split_pairs() -> tuple[list[Pair], list[Pair]]:
    """Choose train and held-out pairs of different numbers, each in one order, and none that the prompts show."""
    shown = [set(pair) for pair in SHOWN]
    pairs = [pair for pair in combinations(FACTORS, 2) if set(pair) not in shown]
    pairs = random.Random(SEED).sample(pairs, NUM_TRAIN + NUM_HELD_OUT)
    return pairs[:NUM_TRAIN], pairs[NUM_TRAIN:]


def build_row(pair: Pair) -> str:
    a, b = pair
    messages = [message for shown in SHOWN for message in build_example(*shown)]
    messages.append({"role": "user", "content": f"What is {a} * {b}?"})
    return json.dumps({"messages": messages, "answer": str(a * b), "a": a, "b": b}) + "\n"


def build_example(a: int, b: int) -> list[Message]:
    """Return a question, the call, its result and the answer, as RLJob writes them for this model."""
    call = f'<tool_call>\n{{"name": "multiply", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'
    return [
        {"role": "user", "content": f"What is {a} * {b}?"},
        {"role": "assistant", "content": call},
        {"role": "user", "content": f"<tool_response>\n{a * b}\n</tool_response>"},
        {"role": "assistant", "content": str(a * b)},
    ]


def main() -> None:
    folder = Path(__file__).resolve().parent / "calculator" / "data"
    folder.mkdir(exist_ok=True)
    for name, pairs in zip(("train", "eval"), split_pairs(), strict=True):
        (folder / f"{name}.jsonl").write_text("".join(map(build_row, pairs)))


if __name__ == "__main__":
    main()
