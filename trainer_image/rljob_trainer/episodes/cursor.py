"""The order in which prompts are used: a cursor over the rows of the dataset.

Invariant: the row at (epoch, position) is a pure function of the number of rows, the seed and that pair, so a cursor of
two integers resumes exactly. Rows that are left out are skipped, so a new limit changes nothing about the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from rljob_inputs.data.prompts import PromptSet
from rljob_inputs.prompts import Prompt


@dataclass(frozen=True)
class Cursor:
    epoch: int = 0
    position: int = 0


def take(prompts: PromptSet, cursor: Cursor, count: int, *, seed: int, shuffle: bool) -> tuple[list[Prompt], Cursor]:
    """Return the next `count` prompts, across epoch ends, and the cursor after them. There must be at least one."""
    taken: list[Prompt] = []
    epoch, position = cursor.epoch, cursor.position
    while len(taken) < count:
        row = epoch_order(prompts.num_rows, epoch, seed=seed, shuffle=shuffle)[position]
        if (prompt := prompts.by_row.get(int(row))) is not None:
            taken.append(prompt)
        position += 1
        if position == prompts.num_rows:
            epoch, position = epoch + 1, 0
    return taken, Cursor(epoch, position)


@lru_cache(maxsize=2)
def epoch_order(num_rows: int, epoch: int, *, seed: int, shuffle: bool) -> NDArray[np.int64]:
    """Return the rows in the order of one epoch.  [rows]"""
    if not shuffle:
        return np.arange(num_rows)
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(num_rows)
