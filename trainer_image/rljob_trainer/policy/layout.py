"""Divides the rows of an update among ranks and micro-batches, and packs what each rank needs.

Pure (numpy only). The driver divides by lengths alone and sends each rank its rows once; the rank writes its
micro-batches (micro_batches.py). Rows with the same prompt share it in a tree: the prompt, followed by the completions
(branches) of its rows.
Invariants: every rank gets the same number of micro-batches, since each is a collective. A row is in one micro-batch as
a whole. Rows without sampled tokens are in none.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rljob_trainer.episodes.types import TrainRow, UpdateVersions

_UNLIMITED = sys.maxsize


@dataclass(frozen=True)
class Layout:
    """How the attention of a model lets rows share micro-batches. The tokens of a micro-batch limit all lengths."""

    tree_tokens: int
    """A longer tree is split. 0: each row is a tree."""
    line_tokens: int
    """Trees share a line up to this length. 0: each tree is a line."""


PLAIN = Layout(0, 0)
"""A line per row, under a causal mask."""
MASKED_TREES = Layout(tree_tokens=1024, line_tokens=512)
"""For dense masks, measured on CPUs: attention grows with the length of lines, and padding shrinks with it."""
PACKED_ROWS = Layout(0, _UNLIMITED)
"""For attention by cumulative lengths. Nothing is padded: a micro-batch is one line; two that fit would be one."""
PACKED_TREES = Layout(_UNLIMITED, _UNLIMITED)
"""The same, where a completion may read the keys of its prompt from elsewhere in the line."""

Batches = list[list[list[list[int]]]]
"""[micro-batches][lines][trees][rows] Indices of rows in the call. An idle micro-batch is empty."""

_OPTIONAL = ("reference_logprobs", "returns", "values")


@dataclass(frozen=True)
class RankRows:
    """What one rank computes in a call. Few and small arrays, for Ray's object store."""

    batches: Batches
    indices: NDArray[np.int32]
    """[rows] Index of each row in the call."""
    firsts: NDArray[np.int32]
    """[rows] Position of the first sampled token: the length of the prompt."""
    lengths: NDArray[np.int32]
    """[rows] Tokens from the first to the last sampled one."""
    weights: NDArray[np.float32]
    """[rows] Of each sampled token in the loss."""
    prompts: NDArray[np.int32]
    """[prompt tokens] Of all trees, one after the other."""
    token_ids: NDArray[np.int32]
    """[completion tokens] Of all rows, from the first to the last sampled token."""
    loss_mask: NDArray[np.bool_]
    """[completion tokens] Whether the policy sampled the token."""
    advantages: NDArray[np.float32]
    """[sampled] As all that follow."""
    rollout_logprobs: NDArray[np.float32]
    token_versions: NDArray[np.int32]
    optional: Mapping[str, NDArray[np.float32]]
    """By field of TrainRow, those that the rows have."""
    versions: UpdateVersions


@dataclass
class _Tree:
    rows: list[int] = field(default_factory=list)
    length: int = 0


def has_loss(row: TrainRow, *, without_advantage: bool) -> bool:
    """Return whether a row can have a gradient. `without_advantage`: a KL penalty or an entropy bonus gives one to all
    sampled tokens, as a critic's loss does."""
    has_terms = without_advantage or row.returns is not None
    return bool(row.loss_mask.any()) and (has_terms or bool(row.advantages[row.loss_mask].any()))


def divide_rows(
    rows: Sequence[TrainRow],
    *,
    num_ranks: int,
    micro_batch_tokens: int,
    layout: Layout = MASKED_TREES,
    without_advantage: bool = True,
    versions: UpdateVersions | None = None,
) -> list[RankRows]:
    """Return what each rank computes, for the rows that can have a gradient (see `has_loss`). `versions`: of the
    update; None for log-probs alone."""
    chosen = {i: row for i, row in enumerate(rows) if has_loss(row, without_advantage=without_advantage)}
    spans = {i: _sampled_span(row) for i, row in chosen.items()}
    if any(first == 0 for first, _ in spans.values()):
        raise ValueError("a row must start with at least one prompt token, got a sampled token")
    division = _Division(chosen, spans, num_ranks, micro_batch_tokens, layout)
    plans = division.build()
    count = max(map(len, plans))
    for plan in plans:
        plan.extend([] for _ in range(count - len(plan)))
    optional = [name for name in _OPTIONAL if chosen and getattr(next(iter(chosen.values())), name) is not None]
    return [_pack(plan, chosen, spans, optional, versions or UpdateVersions(0, 0, 1)) for plan in plans]


def _sampled_span(row: TrainRow) -> tuple[int, int]:
    """Return the positions of the first and the last sampled token. The prompt ends before the first; the last one
    predicts nothing."""
    mask = row.loss_mask
    return int(mask.argmax()), len(mask) - 1 - int(mask[::-1].argmax())


@dataclass(frozen=True)
class _Division:
    rows: Mapping[int, TrainRow]
    """By index in the call."""
    spans: Mapping[int, tuple[int, int]]
    num_ranks: int
    micro_batch_tokens: int
    layout: Layout

    def build(self) -> list[Batches]:
        """Return the micro-batches of each rank."""
        loads = [0] * self.num_ranks
        of_rank: list[list[_Tree]] = [[] for _ in range(self.num_ranks)]
        for tree in sorted(self._trees(), key=lambda tree: (-tree.length, tree.rows)):
            rank = loads.index(min(loads))
            of_rank[rank].append(tree)
            loads[rank] += tree.length
        return [self._micro_batches(trees) for trees in of_rank]

    def _trees(self) -> list[_Tree]:
        fair_share = -(-sum(last for _, last in self.spans.values()) // self.num_ranks)
        limit = min(self.layout.tree_tokens, self.micro_batch_tokens, fair_share)
        trees: list[_Tree] = []
        open_trees: dict[bytes, _Tree] = {}
        for i, (first, last) in self.spans.items():
            key, length = self.rows[i].token_ids[:first].tobytes(), last - first
            tree = open_trees.get(key)
            if tree is None or tree.length + length > limit:
                tree = open_trees[key] = _Tree(length=first)
                trees.append(tree)
            tree.rows.append(i)
            tree.length += length
        return trees

    def _micro_batches(self, trees: Sequence[_Tree]) -> Batches:
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
        return [[[tree.rows for tree in line] for line in batch] for batch in batches]

    def _lines(self, trees: Sequence[_Tree]) -> list[list[_Tree]]:
        """Put each tree into the first line with room for it."""
        limit = min(self.layout.line_tokens, self.micro_batch_tokens)
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


def _line_length(line: Sequence[_Tree]) -> int:
    return sum(tree.length for tree in line)


def _pack(
    batches: Batches,
    chosen: Mapping[int, TrainRow],
    spans: Mapping[int, tuple[int, int]],
    optional: Sequence[str],
    versions: UpdateVersions,
) -> RankRows:
    trees = [tree for batch in batches for line in batch for tree in line]
    indices = [i for tree in trees for i in tree]
    completions = {i: slice(spans[i][0], spans[i][1] + 1) for i in indices}
    masks = {i: chosen[i].loss_mask[completions[i]] for i in indices}

    def joined(arrays: Sequence[NDArray[Any]], dtype: DTypeLike) -> NDArray[Any]:
        return np.concatenate(arrays, dtype=dtype, casting="same_kind") if arrays else np.zeros(0, dtype)

    def sampled(name: str, dtype: DTypeLike = np.float32) -> NDArray[Any]:
        return joined([getattr(chosen[i], name)[completions[i]][masks[i]] for i in indices], dtype)

    return RankRows(
        batches=batches,
        indices=np.array(indices, np.int32),
        firsts=np.array([spans[i][0] for i in indices], np.int32),
        lengths=np.array([len(masks[i]) for i in indices], np.int32),
        weights=np.array([chosen[i].weight for i in indices], np.float32),
        prompts=joined([chosen[tree[0]].token_ids[: spans[tree[0]][0]] for tree in trees], np.int32),
        token_ids=joined([chosen[i].token_ids[completions[i]] for i in indices], np.int32),
        loss_mask=joined([masks[i] for i in indices], np.bool_),
        advantages=sampled("advantages"),
        rollout_logprobs=sampled("rollout_logprobs"),
        token_versions=sampled("versions", np.int32),
        optional={name: sampled(name) for name in optional},
        versions=versions,
    )
