"""Assigns the rows of an update to ranks and micro-batches.

Pure (numpy only). Rows with the same prompt share it: a line of a micro-batch holds trees, and a tree is one prompt
followed by the completions (branches) of its rows. A token attends to its own branch and its prompt only. So a group's
prompt is computed once, only line ends are padded, and the result equals that of separate sequences.
Invariants: every rank gets the same number of micro-batches, since each is a collective. A row is in one micro-batch as
a whole. Rows without sampled tokens are in none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rljob_trainer.algorithms.corrections import proximal_shares
from rljob_trainer.episodes.types import TrainRow, UpdateVersions

LINE_TOKENS = 512
"""Small trees share a line up to this length. Longer lines need less padding, but more attention."""
TREE_TOKENS = 1024
"""A longer tree is split, since attention is dense over all of its branches."""
_IDLE = -1


@dataclass(frozen=True)
class MicroBatch:
    """Lines for one forward, and the sampled tokens that they predict. Picklable, to be sent to a rank: hence int32."""

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


@dataclass
class _Tree:
    prompt: NDArray[np.int64]
    rows: list[int] = field(default_factory=list)
    length: int = 0


def has_loss(row: TrainRow, *, without_advantage: bool) -> bool:
    """Return whether a row can have a gradient. `without_advantage`: a KL penalty or an entropy bonus gives one to all
    sampled tokens, as a critic's loss does."""
    has_terms = without_advantage or row.returns is not None
    return bool(row.loss_mask.any()) and (has_terms or bool(row.advantages[row.loss_mask].any()))


def plan_micro_batches(
    rows: Sequence[TrainRow],
    *,
    num_ranks: int,
    micro_batch_tokens: int,
    share_prompts: bool = True,
    without_advantage: bool = True,
    versions: UpdateVersions | None = None,
) -> list[RankPlan]:
    """Return one plan per rank, for the rows that can have a gradient (see `has_loss`). `versions`: of the update; None
    for log-probs alone."""
    chosen = {i: row for i, row in enumerate(rows) if has_loss(row, without_advantage=without_advantage)}
    sampled = {i: np.flatnonzero(row.loss_mask) for i, row in chosen.items()}
    if any(positions[0] == 0 for positions in sampled.values()):
        raise ValueError("a row must start with at least one prompt token, got a sampled token")
    layout = _Layout(chosen, sampled, num_ranks, micro_batch_tokens, share_prompts, versions or UpdateVersions(0, 0))
    plans = layout.build()
    count = max(map(len, plans))
    for plan in plans:
        plan.extend(_idle_micro_batch(next(iter(chosen.values()))) for _ in range(count - len(plan)))
    return plans


def _idle_micro_batch(like: TrainRow) -> MicroBatch:
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
        reference_logprobs=None if like.reference_logprobs is None else nothing,
        returns=None if like.returns is None else nothing,
        values=None if like.values is None else nothing,
    )


@dataclass(frozen=True)
class _Layout:
    rows: Mapping[int, TrainRow]
    """By index in the call."""
    sampled: Mapping[int, NDArray[np.int64]]
    """Positions of each row's sampled tokens. The prompt ends before the first; the last one predicts nothing."""
    num_ranks: int
    micro_batch_tokens: int
    share_prompts: bool
    versions: UpdateVersions

    def build(self) -> list[RankPlan]:
        """Return the micro-batches of each rank."""
        loads = [0] * self.num_ranks
        of_rank: list[list[_Tree]] = [[] for _ in range(self.num_ranks)]
        for tree in sorted(self._trees(), key=lambda tree: (-tree.length, tree.rows)):
            rank = loads.index(min(loads))
            of_rank[rank].append(tree)
            loads[rank] += tree.length
        return [self._micro_batches(trees) for trees in of_rank]

    def _trees(self) -> list[_Tree]:
        fair_share = -(-sum(int(positions[-1]) for positions in self.sampled.values()) // self.num_ranks)
        limit = min(TREE_TOKENS, self.micro_batch_tokens, fair_share) if self.share_prompts else 0
        trees: list[_Tree] = []
        open_trees: dict[bytes, _Tree] = {}
        for i, positions in self.sampled.items():
            first, last = int(positions[0]), int(positions[-1])
            prompt, length = self.rows[i].token_ids[:first], last - first
            key = prompt.tobytes()
            tree = open_trees.get(key)
            if tree is None or tree.length + length > limit:
                tree = open_trees[key] = _Tree(prompt, length=first)
                trees.append(tree)
            tree.rows.append(i)
            tree.length += length
        return trees

    def _micro_batches(self, trees: Sequence[_Tree]) -> RankPlan:
        lines = sorted(self._lines(trees), key=_line_length, reverse=True)
        batches: list[list[list[_Tree]]] = []
        width = 0
        for line in lines:
            # The first line is the longest; the others are padded to its length.
            if batches and width * (len(batches[-1]) + 1) <= self.micro_batch_tokens:
                batches[-1].append(line)
            else:
                batches.append([line])
                width = _line_length(line)
        return [self._pack(batch) for batch in batches]

    def _lines(self, trees: Sequence[_Tree]) -> list[list[_Tree]]:
        """Put each tree into the first line with room for it."""
        limit = min(LINE_TOKENS, self.micro_batch_tokens) if self.share_prompts else 0
        lines: list[list[_Tree]] = []
        lengths = np.zeros(len(trees), np.int64)
        for tree in trees:
            room = lengths[: len(lines)] + tree.length <= limit
            number = int(room.argmax()) if room.any() else len(lines)
            if number == len(lines):
                lines.append([])
            lines[number].append(tree)
            lengths[number] += tree.length
        return lines

    def _pack(self, lines: Sequence[Sequence[_Tree]]) -> MicroBatch:
        width = _line_length(lines[0])
        grid = np.zeros((4, len(lines), width), np.int32)  # token ids, positions, trees, branches
        grid[2] = -1
        indices: list[int] = []
        sources: list[NDArray[np.int32]] = []
        for line, trees in enumerate(lines):
            start = 0
            for number, tree in enumerate(trees):
                placed = self._place(grid[:, line, start:], number, tree)
                sources += [line * width + start + columns for columns in placed]
                indices += tree.rows
                start += tree.length
        return self._micro_batch(grid, indices, sources)

    def _place(self, cells: NDArray[np.int32], number: int, tree: _Tree) -> list[NDArray[np.int32]]:
        """Write `tree` into the first of `cells`. Return the source column of each target, for each row."""
        placed = []
        _write(cells, tree.prompt, 0, number, branch=0)
        column = len(tree.prompt)
        for branch, i in enumerate(tree.rows, start=1):
            positions = self.sampled[i]
            first, last = int(positions[0]), int(positions[-1])
            _write(cells[:, column:], self.rows[i].token_ids[first:last], first, number, branch)
            columns = positions.astype(np.int32) + (column - 1 - first)
            columns[0] = len(tree.prompt) - 1
            placed.append(columns)
            column += last - first
        return placed

    def _micro_batch(
        self, grid: NDArray[np.int32], indices: Sequence[int], sources: Sequence[NDArray[np.int32]]
    ) -> MicroBatch:
        rows = [self.rows[i] for i in indices]
        counts = [len(columns) for columns in sources]
        positions = [self.sampled[i] for i in indices]

        def sampled(name: str, dtype: DTypeLike = np.float32) -> NDArray[Any]:
            arrays = (getattr(row, name) for row in rows)
            return np.concatenate([array[chosen] for array, chosen in zip(arrays, positions, strict=True)], dtype=dtype)

        def optional(name: str) -> NDArray[np.float32] | None:
            return None if getattr(rows[0], name) is None else sampled(name)

        token_ids, position_ids, trees, branches = grid
        return MicroBatch(
            token_ids=token_ids,
            position_ids=position_ids,
            trees=trees,
            branches=branches,
            row_indices=np.array(indices, np.int32),
            sources=np.concatenate(sources),
            targets=sampled("token_ids", np.int32),
            rows=np.repeat(np.arange(len(rows), dtype=np.int32), counts),
            positions=np.concatenate(positions, dtype=np.int32),
            weights=np.repeat(np.array([row.weight for row in rows], np.float32), counts),
            advantages=sampled("advantages"),
            rollout_logprobs=sampled("rollout_logprobs"),
            proximal_shares=proximal_shares(
                sampled("versions", np.int32), self.versions.proximal, self.versions.current
            ),
            reference_logprobs=optional("reference_logprobs"),
            returns=optional("returns"),
            values=optional("values"),
        )


def _write(cells: NDArray[np.int32], tokens: NDArray[np.int64], position: int, tree: int, branch: int) -> None:
    """Write the tokens of one branch into the first of `cells`.  cells  # [4, columns]"""
    used = cells[:, : len(tokens)]
    used[0] = tokens
    used[1] = np.arange(position, position + len(tokens))
    used[2:] = [[tree], [branch]]


def _line_length(line: Sequence[_Tree]) -> int:
    return sum(tree.length for tree in line)
