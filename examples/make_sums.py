"""Writes the additions that quickstart and chat train on, and 100 as given answers: `python examples/make_sums.py`.

The result is in git (quickstart/data). Invariant: no held-out pair is trained on, neither as a + b nor as b + a.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

MAX_ADDEND = 20
NUM_HELD_OUT = 128
NUM_GIVEN = 100
SEED = 0

Pair = tuple[int, int]


def split_pairs() -> tuple[list[Pair], list[Pair]]:
    """Split all ordered pairs of 1..20 into train and held-out pairs."""
    pairs = [(a, b) for a in range(1, MAX_ADDEND + 1) for b in range(1, MAX_ADDEND + 1)]
    random.Random(SEED).shuffle(pairs)
    held_out = pairs[:NUM_HELD_OUT]
    excluded = {*held_out, *((b, a) for a, b in held_out)}
    return [pair for pair in pairs if pair not in excluded], held_out


def build_row(pair: Pair) -> str:
    a, b = pair
    return json.dumps({"question": f"What is {a} + {b}?", "answer": str(a + b), "a": a, "b": b}) + "\n"


def build_given_row(pair: Pair) -> str:
    """Return a row of a warm start: the answer begins with the space that follows `Answer:`."""
    a, b = pair
    return json.dumps({"question": f"What is {a} + {b}?", "answer": f" {a + b}"}) + "\n"


def main() -> None:
    folder = Path(__file__).resolve().parent / "quickstart" / "data"
    folder.mkdir(exist_ok=True)
    for name, pairs in zip(("train", "eval"), split_pairs(), strict=True):
        (folder / f"{name}.jsonl").write_text("".join(map(build_row, pairs)))
    (folder / "given.jsonl").write_text("".join(map(build_given_row, split_pairs()[0][:NUM_GIVEN])))


if __name__ == "__main__":
    main()
