"""Assigns the samples of a mini-batch to ranks and rows, and computes the weight of each token.

Pure (numpy only). Samples with the same prompt share it: a row holds trees, and a tree is one prompt followed by its
completions (branches). A token attends to its own branch and its prompt only. So a group's prompt is computed once,
only row ends are padded, and the result equals that of separate sequences.
Invariants: every rank gets the same number of micro-batches, since each is a collective. Masked samples are in none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rljob_trainer.episodes.types import TrainSample

ROW_TOKENS = 512
"""Small trees share a row up to this length. Longer rows need less padding, but more attention."""
TREE_TOKENS = 1024
"""A longer tree is split, since attention is dense over all of its branches."""
BACKWARD_COST = 3.0
"""Cost of a forward and a backward, relative to a forward."""


@dataclass(frozen=True)
class MicroBatch:
    """Rows for one forward, and the sampled tokens that they predict. Picklable, to be sent to a rank."""

    token_ids: NDArray[np.int64]
    """[rows, length] 0 for padding."""
    position_ids: NDArray[np.int64]
    """[rows, length] Position in the token's episode."""
    trees: NDArray[np.int64]
    """[rows, length] Number of the tree in its row; -1 for padding."""
    branches: NDArray[np.int64]
    """[rows, length] 0 for the prompt, otherwise the number of the completion in its tree."""
    sources: NDArray[np.int64]
    """[targets] Flat index (row * length + column) of the token that predicts the target."""
    targets: NDArray[np.int64]
    """[targets] Sampled token."""
    samples: NDArray[np.int64]
    """[targets] Index of the sample; -1 in an idle micro-batch."""
    positions: NDArray[np.int64]
    """[targets] Index of the target in its sample."""
    advantages: NDArray[np.float32]
    rollout_logprobs: NDArray[np.float32]
    old_logprobs: NDArray[np.float32] | None
    weights: NDArray[np.float32]

    @property
    def is_plain(self) -> bool:
        """Whether each row is one episode, so that a causal mask suffices."""
        return bool((self.trees <= 0).all() and (self.branches <= 1).all())


@dataclass(frozen=True)
class RankPlan:
    forward_only: list[MicroBatch]
    """Micro-batches that count in the metrics and have no gradient."""
    train: list[MicroBatch]


@dataclass
class _Tree:
    prompt: Sequence[int]
    samples: list[int] = field(default_factory=list)
    length: int = 0


def token_weights(samples: Sequence[TrainSample], level: Literal["token", "sequence"]) -> list[float]:  # [samples]
    """Return the weight of a sampled token of each sample in the mini-batch's loss. All tokens' weights sum to 1."""
    counts = [sum(sample.loss_mask) for sample in samples]
    num_tokens, num_episodes = sum(counts), sum(count > 0 for count in counts)
    if level == "token":
        return [1 / num_tokens if count else 0.0 for count in counts]
    return [1 / (num_episodes * count) if count else 0.0 for count in counts]


def plan_micro_batches(
    samples: Sequence[TrainSample],
    *,
    num_ranks: int,
    micro_batch_tokens: int,
    loss_level: Literal["token", "sequence"] = "token",
    share_prompts: bool = True,
    skip_zero_advantages: bool = False,
) -> list[RankPlan]:
    """Return one plan per rank. `skip_zero_advantages`: without KL and entropy terms, samples with advantage 0 have no
    gradient. They get no backward, but count in every mean."""
    weights = token_weights(samples, loss_level)
    sampled = [i for i, sample in enumerate(samples) if any(sample.loss_mask)]
    idle = [i for i in sampled if skip_zero_advantages and samples[i].advantage == 0]
    train = [i for i in sampled if not (skip_zero_advantages and samples[i].advantage == 0)]
    loads = [0.0] * num_ranks
    layout = _Layout(samples, weights, num_ranks, micro_batch_tokens, share_prompts)
    train_batches = layout.build(train, loads, BACKWARD_COST)
    idle_batches = layout.build(idle, loads, 1.0)
    # Without samples to train on, one idle backward gives every parameter a gradient of zero.
    _pad_to_equal_counts(train_batches, minimum=1)
    _pad_to_equal_counts(idle_batches, minimum=0)
    return [RankPlan(*pair) for pair in zip(idle_batches, train_batches, strict=True)]


def _pad_to_equal_counts(batches: list[list[MicroBatch]], minimum: int) -> None:
    count = max(minimum, *(len(of_rank) for of_rank in batches))
    for of_rank in batches:
        of_rank.extend(_idle_micro_batch() for _ in range(count - len(of_rank)))


def _idle_micro_batch() -> MicroBatch:
    """Return one token of weight 0, for a rank that must take part in the collectives of a micro-batch."""
    zeros, one = np.zeros(1, np.int64), np.zeros((1, 1), np.int64)
    nothing = np.zeros(1, np.float32)
    return MicroBatch(
        token_ids=one,
        position_ids=one,
        trees=one,
        branches=one,
        sources=zeros,
        targets=zeros,
        samples=zeros - 1,
        positions=zeros,
        advantages=nothing,
        rollout_logprobs=nothing,
        old_logprobs=None,
        weights=nothing,
    )


@dataclass(frozen=True)
class _Layout:
    samples: Sequence[TrainSample]
    weights: Sequence[float]
    num_ranks: int
    micro_batch_tokens: int
    share_prompts: bool

    def build(self, chosen: Sequence[int], loads: list[float], cost: float) -> list[list[MicroBatch]]:
        """Return the micro-batches of each rank for the `chosen` samples, and add their cost to `loads` (by rank)."""
        of_rank: list[list[_Tree]] = [[] for _ in range(self.num_ranks)]
        for tree in sorted(self._trees(chosen), key=lambda tree: (-tree.length, tree.samples)):
            rank = loads.index(min(loads))
            of_rank[rank].append(tree)
            loads[rank] += cost * tree.length
        return [self._micro_batches(trees) for trees in of_rank]

    def _trees(self, chosen: Sequence[int]) -> list[_Tree]:
        lengths = {i: _span(self.samples[i]) for i in chosen}
        fair_share = -(-sum(last for _, last in lengths.values()) // self.num_ranks)
        limit = min(TREE_TOKENS, self.micro_batch_tokens, fair_share) if self.share_prompts else 0
        trees: list[_Tree] = []
        open_trees: dict[tuple[int, ...], _Tree] = {}
        for i in chosen:
            first, last = lengths[i]
            prompt = tuple(self.samples[i].token_ids[:first])
            tree = open_trees.get(prompt)
            if tree is None or tree.length + last - first > limit:
                tree = open_trees[prompt] = _Tree(prompt, length=first)
                trees.append(tree)
            tree.samples.append(i)
            tree.length += last - first
        return trees

    def _micro_batches(self, trees: list[_Tree]) -> list[MicroBatch]:
        rows = self._rows(trees)
        rows.sort(key=_row_length, reverse=True)
        batches: list[list[list[_Tree]]] = []
        for row in rows:
            # The first row is the longest; the others are padded to its length.
            if batches and _row_length(batches[-1][0]) * (len(batches[-1]) + 1) <= self.micro_batch_tokens:
                batches[-1].append(row)
            else:
                batches.append([row])
        return [self._pack(batch) for batch in batches]

    def _rows(self, trees: list[_Tree]) -> list[list[_Tree]]:
        limit = min(ROW_TOKENS, self.micro_batch_tokens) if self.share_prompts else 0
        rows: list[list[_Tree]] = []
        for tree in trees:
            row = next((row for row in rows if _row_length(row) + tree.length <= limit), None)
            if row is None:
                rows.append([tree])
            else:
                row.append(tree)
        return rows

    def _pack(self, rows: list[list[_Tree]]) -> MicroBatch:
        width = max(_row_length(row) for row in rows)
        grid = np.zeros((4, len(rows), width), np.int64)  # token ids, positions, trees, branches
        grid[2] = -1
        tokens: list[tuple[int, int, int, int]] = []  # (source, target, sample, position)
        for row, trees in enumerate(rows):
            start = 0
            for number, tree in enumerate(trees):
                for column, target, sample, position in self._place(grid[:, row, start:], number, tree):
                    tokens.append((row * width + start + column, target, sample, position))
                start += tree.length
        sources, targets, owners, positions = np.array(tokens, np.int64).T
        chosen = [self.samples[i] for i in owners]
        old = [
            np.nan if sample.old_logprobs is None else sample.old_logprobs[t]
            for sample, t in zip(chosen, positions, strict=True)
        ]
        return MicroBatch(
            token_ids=grid[0],
            position_ids=grid[1],
            trees=grid[2],
            branches=grid[3],
            sources=sources,
            targets=targets,
            samples=owners,
            positions=positions,
            advantages=_floats(sample.advantage for sample in chosen),
            rollout_logprobs=_floats(s.rollout_logprobs[t] for s, t in zip(chosen, positions, strict=True)),
            old_logprobs=None if np.isnan(old).any() else np.array(old, np.float32),
            weights=_floats(self.weights[i] for i in owners),
        )

    def _place(self, cells: NDArray[np.int64], number: int, tree: _Tree) -> Iterator[tuple[int, int, int, int]]:
        """Write `tree` into the first of `cells`. Yield source column, token, sample and position of each target."""
        _write(cells, tree.prompt, 0, number, branch=0)
        column = len(tree.prompt)
        for branch, i in enumerate(tree.samples, start=1):
            sample = self.samples[i]
            first, last = _span(sample)
            _write(cells[:, column:], sample.token_ids[first:last], first, number, branch)
            for t in range(first, last + 1):
                if sample.loss_mask[t]:
                    source = len(tree.prompt) - 1 if t == first else column + t - 1 - first
                    yield source, sample.token_ids[t], i, t
            column += last - first


def _write(cells: NDArray[np.int64], tokens: Sequence[int], position: int, tree: int, branch: int) -> None:
    """Write the tokens of one branch into the first of `cells`.  cells  # [4, columns]"""
    used = cells[:, : len(tokens)]
    used[0] = tokens
    used[1] = np.arange(position, position + len(tokens))
    used[2:] = [[tree], [branch]]


def _floats(values: Iterable[float]) -> NDArray[np.float32]:
    return np.fromiter(values, np.float32)


def _row_length(row: list[_Tree]) -> int:
    return sum(tree.length for tree in row)


def _span(sample: TrainSample) -> tuple[int, int]:
    """Return the first and the last sampled position. The prompt ends before the first; the last predicts nothing."""
    first = sample.loss_mask.index(1)
    last = len(sample.loss_mask) - 1 - sample.loss_mask[::-1].index(1)
    if first == 0:
        raise ValueError("an episode must start with at least one prompt token, got a sampled token")
    return first, last
