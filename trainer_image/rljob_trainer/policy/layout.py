"""Divides the rows of an update among ranks and micro-batches, and packs what each rank needs.

Pure (numpy only). The driver divides by lengths alone and sends each rank its rows once; the rank writes its
micro-batches. Rows with the same prompt share it in a tree: the prompt, followed by the completions
(branches) of its rows.
Invariants: every rank gets the same number of micro-batches, since each is a collective. A row is in one micro-batch as
a whole. Rows without sampled tokens are in none.

A line of a micro-batch holds trees, and a tree is one prompt followed by the completions (branches)
of its rows. A token attends to its own branch and its prompt only. So a group's prompt is computed once, only line ends
are padded, and the result equals that of separate sequences.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rljob_trainer.episodes.types import TOP, TrainRow, UpdateVersions

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

_OPTIONAL = ("reference_logprobs", "returns", "values", "top")


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
    temperatures: NDArray[np.float64]
    """[rows]"""
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
    optional: Mapping[str, NDArray[Any]]
    """By field of TrainRow, those that the rows have."""
    versions: UpdateVersions


@dataclass
class _Tree:
    rows: list[int] = field(default_factory=list)
    length: int = 0


def has_loss(row: TrainRow, *, without_advantage: bool) -> bool:
    """Return whether a row can have a gradient. `without_advantage`: a KL penalty or an entropy bonus gives one to all
    sampled tokens, as a critic's loss and a teacher with topK do."""
    has_terms = without_advantage or row.returns is not None or row.top is not None
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

    def joined(arrays: Sequence[Any], dtype: DTypeLike) -> NDArray[Any]:
        return np.concatenate(arrays, dtype=dtype, casting="same_kind") if arrays else np.zeros(0, dtype)

    def sampled(name: str, dtype: DTypeLike = np.float32) -> NDArray[Any]:
        return joined([getattr(chosen[i], name)[completions[i]][masks[i]] for i in indices], dtype)

    return RankRows(
        batches=batches,
        indices=np.array(indices, np.int32),
        firsts=np.array([spans[i][0] for i in indices], np.int32),
        lengths=np.array([len(masks[i]) for i in indices], np.int32),
        weights=np.array([chosen[i].weight for i in indices], np.float32),
        temperatures=np.array([chosen[i].temperature for i in indices]),
        prompts=joined([chosen[tree[0]].token_ids[: spans[tree[0]][0]] for tree in trees], np.int32),
        token_ids=joined([chosen[i].token_ids[completions[i]] for i in indices], np.int32),
        loss_mask=joined([masks[i] for i in indices], np.bool_),
        advantages=sampled("advantages"),
        rollout_logprobs=sampled("rollout_logprobs"),
        token_versions=sampled("versions", np.int32),
        optional={
            name: joined([chosen[i].top for i in indices], TOP) if name == "top" else sampled(name) for name in optional
        },
        versions=versions,
    )


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
    temperatures: NDArray[np.float64]
    """[targets] Those at which they were sampled."""
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
    top: NDArray[Any] | None = None
    """[targets, teachers, k] As in TrainRow; None in an idle micro-batch."""

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
        temperatures=np.ones(1),
        advantages=nothing,
        rollout_logprobs=nothing,
        proximal_shares=nothing + 1,
        **dict.fromkeys(part.optional.keys() - {"top"}, nothing),
    )


def proximal_shares(versions: NDArray[np.int32], proximal: float, current: float, end: float) -> NDArray[np.float32]:
    """Return how much of pi is in prox, for tokens that weights of `versions` sampled.  [tokens], 0 to 1

    1 where the current weights sampled the token: prox is pi, the ratio is 1, and the correction is pi / mu. 0 where
    the weights at the start of the step did, and updates followed: prox is mu, as in PPO with the rollout's log-probs.
    Where older weights did, prox is `proximal` on the way from them to `end`, the policy that the step works towards:
    AReaL's rule. The ratio then is a part of pi / mu also in the first update, so clipping ends what stale tokens would
    otherwise push on with each step until newer ones arrive. With `current` as the end, the ratio of these is 1, too.
    """
    age = np.where(versions < proximal, end, current) - versions
    shares = np.divide(proximal - versions, age, out=np.ones(len(versions)), where=age > 0)
    return shares.astype(np.float32)


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
            temperatures=np.repeat(part.temperatures[rows], counts),
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
