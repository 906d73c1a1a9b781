"""Writes the micro-batches of one rank from the rows that the driver sent it (layout.py).

Pure (numpy only). A line of a micro-batch holds trees, and a tree is one prompt followed by the completions (branches)
of its rows. A token attends to its own branch and its prompt only. So a group's prompt is computed once, only line ends
are padded, and the result equals that of separate sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rljob_trainer.algorithms.corrections import proximal_shares
from rljob_trainer.policy.layout import RankRows

_IDLE = -1


@dataclass(frozen=True)
class MicroBatch:
    """Lines for one forward, and the sampled tokens that they predict."""

    token_ids: NDArray[np.int32]
    """[lines, length] 0 for padding."""
    position_ids: NDArray[np.int32]
    """[lines, length] Position in the token's row."""
    trees: NDArray[np.int32]
    """[lines, length] Number of the tree in its line; -1 for padding."""
    branches: NDArray[np.int32]
    """[lines, length] 0 for the prompt, otherwise the number of the completion in its tree."""
    row_indices: NDArray[np.int32]
    """[rows] Index in the call of each row; -1 for the row of an idle micro-batch."""
    sources: NDArray[np.int32]
    """[targets] Flat index (line * length + column) of the token that predicts the target."""
    targets: NDArray[np.int32]
    """[targets] Sampled token."""
    rows: NDArray[np.int32]
    """[targets] Number of the row, of those in `row_indices`."""
    positions: NDArray[np.int32]
    """[targets] Index of the target in its row."""
    weights: NDArray[np.float32]
    """[targets] Of the token in the loss; 0 in an idle micro-batch."""
    advantages: NDArray[np.float32]
    """[targets]"""
    rollout_logprobs: NDArray[np.float32]
    """[targets]"""
    proximal_shares: NDArray[np.float32]
    """[targets] See algorithms.corrections."""
    reference_logprobs: NDArray[np.float32] | None = None
    """[targets] None: the trainer computes them if it needs them."""
    returns: NDArray[np.float32] | None = None
    """[targets] None without a critic."""
    values: NDArray[np.float32] | None = None
    """[targets] None without a critic."""

    @property
    def is_plain(self) -> bool:
        """Whether each line is one row, so that a causal mask suffices."""
        return bool((self.trees <= 0).all() and (self.branches <= 1).all())


RankPlan = list[MicroBatch]
"""The micro-batches of one rank."""


def build_micro_batches(part: RankRows) -> RankPlan:
    """Return the micro-batches of one rank."""
    writer = _Writer(part)
    return [writer.write(batch) if batch else _idle_micro_batch(part) for batch in part.batches]


def _idle_micro_batch(part: RankRows) -> MicroBatch:
    """Return one token of weight 0, for a rank that must take part in the collectives of a micro-batch."""
    zeros, one, nothing = np.zeros(1, np.int32), np.zeros((1, 1), np.int32), np.zeros(1, np.float32)
    return MicroBatch(
        token_ids=one,
        position_ids=one,
        trees=one,
        branches=one,
        row_indices=zeros + _IDLE,
        sources=zeros,
        targets=zeros,
        rows=zeros,
        positions=zeros,
        weights=nothing,
        advantages=nothing,
        rollout_logprobs=nothing,
        proximal_shares=nothing + 1,
        **dict.fromkeys(part.optional, nothing),
    )


class _Writer:
    """Takes the rows of `part` in their order, which is that of its micro-batches."""

    def __init__(self, part: RankRows) -> None:
        self._part = part
        self._targets = part.token_ids[part.loss_mask]
        versions = part.versions
        self._shares = proximal_shares(part.token_versions, versions.proximal, versions.current, versions.end)
        self._row = self._prompt = self._completion = self._sampled = 0
        """How much is written so far."""

    def write(self, lines: Sequence[Sequence[Sequence[int]]]) -> MicroBatch:
        part, first_row, first_sampled = self._part, self._row, self._sampled
        width = self._count_columns(lines[0])
        grid = np.zeros((4, len(lines), width), np.int32)  # token ids, positions, trees, branches
        grid[2] = -1
        sources: list[NDArray[np.int32]] = []
        positions: list[NDArray[np.int32]] = []
        for line, trees in enumerate(lines):
            start = 0
            for number, tree in enumerate(trees):
                start = self._write_tree(grid[:, line], start, number, len(tree), sources, positions)
            for columns in sources[-sum(map(len, trees)) :]:
                columns += line * width
        rows, sampled = slice(first_row, self._row), slice(first_sampled, self._sampled)
        counts = [len(columns) for columns in sources]
        token_ids, position_ids, tree_numbers, branches = grid
        return MicroBatch(
            token_ids=token_ids,
            position_ids=position_ids,
            trees=tree_numbers,
            branches=branches,
            row_indices=part.indices[rows],
            sources=np.concatenate(sources),
            targets=self._targets[sampled],
            rows=np.repeat(np.arange(len(counts), dtype=np.int32), counts),
            positions=np.concatenate(positions),
            weights=np.repeat(part.weights[rows], counts),
            advantages=part.advantages[sampled],
            rollout_logprobs=part.rollout_logprobs[sampled],
            proximal_shares=self._shares[sampled],
            **{name: values[sampled] for name, values in part.optional.items()},
        )

    def _count_columns(self, line: Sequence[Sequence[int]]) -> int:
        """Return the length of the next line. The last token of a row predicts nothing, and has no column."""
        row, total = self._row, 0
        for tree in line:
            total += int(self._part.firsts[row]) + int(self._part.lengths[row : row + len(tree)].sum()) - len(tree)
            row += len(tree)
        return total

    def _write_tree(
        self,
        cells: NDArray[np.int32],
        start: int,
        number: int,
        num_rows: int,
        sources: list[NDArray[np.int32]],
        positions: list[NDArray[np.int32]],
    ) -> int:
        """Write the next tree from column `start` of `cells` on, and return the column after it. Append the columns
        that predict each row's targets, and the targets' positions.  cells  # [4, columns]"""
        part = self._part
        first = int(part.firsts[self._row])
        _write(cells[:, start:], part.prompts[self._prompt : self._prompt + first], 0, number, branch=0)
        self._prompt += first
        column = start + first
        for branch in range(1, num_rows + 1):
            span = slice(self._completion, self._completion + int(part.lengths[self._row]))
            _write(cells[:, column:], part.token_ids[span][:-1], first, number, branch)
            offsets = np.flatnonzero(part.loss_mask[span]).astype(np.int32)
            columns = offsets + np.int32(column - 1)
            columns[0] = start + first - 1  # the prompt's last token predicts the first one
            sources.append(columns)
            positions.append(offsets + np.int32(first))
            column += span.stop - span.start - 1
            self._completion, self._row = span.stop, self._row + 1
            self._sampled += len(offsets)
        return column


def _write(cells: NDArray[np.int32], tokens: NDArray[np.int32], position: int, tree: int, branch: int) -> None:
    """Write the tokens of one branch into the first of `cells`.  cells  # [4, columns]"""
    used = cells[:, : len(tokens)]
    used[0] = tokens
    used[1] = np.arange(position, position + len(tokens))
    used[2:] = [[tree], [branch]]
