"""Writes the products that the calculator example trains on: `python examples/make_products.py`.

The result is in git (calculator/data). Invariant: no held-out pair is trained on, neither as a * b nor as b * a.
"""

from __future__ import annotations

import json
import random
from itertools import combinations
from pathlib import Path

FACTORS = range(11, 100)
NUM_TRAIN, NUM_HELD_OUT = 256, 64
SEED = 0

Pair = tuple[int, int]


def split_pairs() -> tuple[list[Pair], list[Pair]]:
    """Choose train and held-out pairs of different numbers, each in one order."""
    pairs = random.Random(SEED).sample(list(combinations(FACTORS, 2)), NUM_TRAIN + NUM_HELD_OUT)
    return pairs[:NUM_TRAIN], pairs[NUM_TRAIN:]


def build_row(pair: Pair) -> str:
    a, b = pair
    return json.dumps({"question": f"What is {a} * {b}?", "answer": str(a * b), "a": a, "b": b}) + "\n"


def main() -> None:
    folder = Path(__file__).resolve().parent / "calculator" / "data"
    folder.mkdir(exist_ok=True)
    for name, pairs in zip(("train", "eval"), split_pairs(), strict=True):
        (folder / f"{name}.jsonl").write_text("".join(map(build_row, pairs)))


if __name__ == "__main__":
    main()
