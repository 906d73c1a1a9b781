"""The floating-point operations that an update needs, whatever the layout of its micro-batches. Pure.

A multiply-add counts 2, and the backward pass twice the forward pass. Counted: matrix products of decoder layers and
head, and causal attention. Not counted: padding, activations that are computed again, element-wise arithmetic, and all
prompts of a group but one, since their keys and values are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rljob_inputs.memory.shapes import Shape
from rljob_trainer.episodes.types import TrainRow

_PASSES = 3
"""One forward pass, and a backward pass of twice its operations."""


@dataclass(frozen=True)
class Work:
    """What the rows of one update need."""

    row_tokens: int
    """Prompts counted once per row."""
    needed_tokens: int
    """Prompts counted once per group; without the last token of a row, which predicts nothing."""
    operations: float


def count_work(rows: Sequence[TrainRow], shape: Shape) -> Work:
    needed = targets = visible = 0
    prompts: set[bytes] = set()
    for row in rows:
        first = int(np.argmax(row.loss_mask))
        last = len(row.token_ids) - 1
        needed += last - first
        targets += int(row.loss_mask.sum())
        visible += _causal_pairs(last) - _causal_pairs(first)
        prompt = row.token_ids[:first].tobytes()
        if prompt not in prompts:
            prompts.add(prompt)
            needed += first
            visible += _causal_pairs(first)
    # Norms and biases are among the parameters of a layer, but are few.
    layers = 2 * shape.num_layers * shape.layer_parameters * needed
    attention = 4 * shape.num_layers * shape.query * visible  # scores, and the sum of values
    head = 2 * shape.hidden * shape.vocabulary * targets
    row_tokens = sum(len(row.token_ids) for row in rows)
    return Work(row_tokens, needed, float(_PASSES * (layers + attention + head)))


def _causal_pairs(length: int) -> int:
    return length * (length + 1) // 2
