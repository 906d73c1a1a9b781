"""The order in which the prompts of one source are used: a cursor over its rows, epoch after epoch.

Invariant: the row at (epoch, position) is a pure function of the number of rows, the seed, the source's number and that
pair, so a cursor of two integers resumes exactly. Rows that are left out are skipped, so a new limit changes nothing
about the others.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rljob_inputs.data.prompts import PromptSet


@dataclass(frozen=True)
class Cursor:
    epoch: int = 0
    position: int = 0


def epoch_order(num_rows: int, epoch: int, *, seed: int, shuffle: bool, source: int = 0) -> NDArray[np.int64]:
    """Return the rows in the order of one epoch of a source, by its number in the job.  [rows]"""
    if not shuffle:
        return np.arange(num_rows)
    return np.random.Generator(np.random.PCG64([seed, epoch, source])).permutation(num_rows)


class EpochReader:
    """Reads the rows of one source in order. It keeps the order of the current epoch: 8 bytes a row."""

    def __init__(self, prompts: PromptSet, cursor: Cursor, *, seed: int, shuffle: bool, source: int = 0) -> None:
        """`prompts`: at least one. `source`: number of the source in the job."""
        self.cursor = cursor
        self._prompts, self._seed, self._shuffle, self._source = prompts, seed, shuffle, source
        self._epoch, self._order = cursor.epoch, self._order_of(cursor.epoch)

    def next_row(self, is_due: Callable[[int, int], bool] = lambda row, epoch: True) -> tuple[int, int]:
        """Return the next row that has a prompt and is due in its epoch, and how many prompts were not due before it.

        Each row must be due in some epoch: else this never returns."""
        num_skipped = 0
        while True:
            row, epoch = self._advance()
            if row in self._prompts.by_row:
                if is_due(row, epoch):
                    return row, num_skipped
                num_skipped += 1

    def _advance(self) -> tuple[int, int]:
        epoch, position = self.cursor.epoch, self.cursor.position
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._order_of(epoch)
        is_last = position + 1 == self._prompts.num_rows
        self.cursor = Cursor(epoch + 1, 0) if is_last else Cursor(epoch, position + 1)
        return int(self._order[position]), epoch

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        return epoch_order(self._prompts.num_rows, epoch, seed=self._seed, shuffle=self._shuffle, source=self._source)
