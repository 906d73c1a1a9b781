"""Packed attention on CPUs: sequences of similar lengths are padded to one batch of matrix products.

torch's flash attention for CPUs has a fixed cost per sequence and head that exceeds the arithmetic of a short one, and
skips nothing under a mask. Here a line costs a few calls, whatever it holds. As in flash attention, scores, softmax and
their gradients are in fp32, and the backward pass computes them again instead of keeping them. A long sequence is
divided into runs of queries, each with the keys up to its last query, so that memory grows with its length only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_RUN_QUERIES = 256
"""Queries of a sequence that are computed at once."""
_MIN_LENGTH = 16
"""Shorter sequences are not worth separate blocks."""
_MAX_SCORES = 1 << 17
"""Scores of a block per head, unless one run has more: their fp32 copies fit a CPU's cache."""


class Block(NamedTuple):
    """Sequences of queries, each with its keys, padded to the longest."""

    shape: tuple[int, int]
    """Sequences, and queries per sequence."""
    key_shape: tuple[int, int]
    """Sequences, and keys per sequence."""
    queries: Tensor
    """[sequences * queries] Column in the line; 0 for padding."""
    keys: Tensor
    """[sequences * keys] Column in the line; 0 for padding."""
    mask: Tensor
    """[sequences, 1, queries, 1, keys] fp32: 0 for a key that the query sees, otherwise -inf. Padding sees all keys."""
    is_query: Tensor
    """[sequences * queries, 1, 1] 0 for padding, otherwise 1."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """Not a tuple: torch.compile would compile a layer again for each number of blocks, and for their shapes."""

    blocks: list[Block]
    places: Tensor
    """[tokens] Where each query of the line is in the blocks' queries, one block after the other."""


def find_blocks(query_ends: NDArray[Any], key_ends: NDArray[Any], keys: NDArray[np.int64] | None) -> Blocks:
    """Return the blocks of a line from the cumulative lengths of its sequences ([sequences + 1]), in which the last
    query sees the last key, and the column of each key (None: that of its index)."""
    runs = _find_runs(query_ends, key_ends)
    blocks, places, offset = [], np.zeros(int(query_ends[-1]), np.int64), 0
    for members in _group(runs):
        query_starts, num_queries, key_starts, num_keys = members.T[:, :, None]  # [sequences, 1]
        rows, columns = np.arange(num_queries.max()), np.arange(num_keys.max())
        is_query, is_key = rows < num_queries, columns < num_keys  # [sequences, queries], [sequences, keys]
        queries = np.where(is_query, query_starts + rows, 0)
        key_columns = np.where(is_key, key_starts + columns, 0)
        if keys is not None:
            key_columns = keys[key_columns]
        last_key = rows + num_keys - num_queries  # [sequences, queries]
        is_visible = (columns <= last_key[:, :, None]) & is_key[:, None]
        places[queries[is_query]] = offset + np.flatnonzero(is_query)
        offset += is_query.size
        mask = torch.where(torch.from_numpy(is_visible), 0.0, -torch.inf)
        blocks.append(
            Block(
                is_query.shape,
                is_key.shape,
                torch.from_numpy(queries.ravel()),
                torch.from_numpy(key_columns.ravel()),
                mask[:, None, :, None],
                torch.from_numpy(is_query.reshape(-1, 1, 1)),
            )
        )
    return Blocks(blocks, torch.from_numpy(places))


def _find_runs(query_ends: NDArray[Any], key_ends: NDArray[Any]) -> NDArray[np.int64]:
    """Return first query, queries, first key and keys of each run.  [runs, 4]"""
    runs = []
    for first, end, first_key, end_key in zip(
        query_ends[:-1].tolist(), query_ends[1:].tolist(), key_ends[:-1].tolist(), key_ends[1:].tolist(), strict=True
    ):
        for start in range(first, end, _RUN_QUERIES):
            stop = min(start + _RUN_QUERIES, end)
            runs.append((start, stop - start, first_key, end_key - (end - stop) - first_key))
    return np.array(runs, np.int64)


def _group(runs: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Group runs whose numbers of queries, and of keys, have the same next power of two."""
    classes: dict[tuple[int, int], list[int]] = {}
    for i, (_, num_queries, _, num_keys) in enumerate(runs.tolist()):
        classes.setdefault((_power_of_two(num_queries), _power_of_two(num_keys)), []).append(i)
    groups = []
    for (num_queries, num_keys), members in classes.items():
        size = max(1, _MAX_SCORES // (num_queries * num_keys))
        groups += [runs[members[start : start + size]] for start in range(0, len(members), size)]
    return groups


def _power_of_two(length: int) -> int:
    return int(1 << (max(length, _MIN_LENGTH) - 1).bit_length())


class PaddedAttention(torch.autograd.Function):
    """softmax(query @ key.T * scale) @ value of each query over the keys that it sees; several heads of queries may
    share one of keys.

    query  # [tokens, heads, dim]    key, value  # [tokens, key heads, dim]
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: Blocks, scale: float) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.blocks, ctx.scale = blocks, scale
        found = []
        for block in blocks.blocks:
            q, k, v = _take(block, query, key, value)
            weights = _weights(q, k, block, scale).to(v.dtype)
            found.append(_join(torch.bmm(weights, v), block.shape))
        return torch.cat(found).index_select(0, blocks.places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        grad_query = []
        # A prompt's keys are in many sequences: their gradients add up in fp32.
        grad_key, grad_value = (torch.zeros_like(states, dtype=torch.float32) for states in (key, value))
        for block in ctx.blocks.blocks:
            q, k, v = _take(block, query, key, value)
            grad = gradient.index_select(0, block.queries).mul_(block.is_query)
            grad = _split(grad, block.shape, key.shape[1])
            weights = _weights(q, k, block, ctx.scale)
            grad_weights = torch.bmm(grad.float(), v.float().transpose(1, 2))
            grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, torch.float32)
            grad_scores = grad_scores.mul_(ctx.scale).to(q.dtype)
            grad_query.append(_join(torch.bmm(grad_scores, k), block.shape))
            for total, pairs, states in ((grad_key, grad_scores, q), (grad_value, weights.to(grad.dtype), grad)):
                products = torch.bmm(pairs.transpose(1, 2), states)
                total.index_add_(0, block.keys, _join(products, block.key_shape).float())
        found = torch.cat(grad_query).index_select(0, ctx.blocks.places)
        return found, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None


def _take(block: Block, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the block's queries, keys and values.  [sequences * key heads, length, dim]"""
    key_heads = key.shape[1]
    return (
        _split(query.index_select(0, block.queries), block.shape, key_heads),
        _split(key.index_select(0, block.keys), block.key_shape, key_heads),
        _split(value.index_select(0, block.keys), block.key_shape, key_heads),
    )


def _weights(q: Tensor, k: Tensor, block: Block, scale: float) -> Tensor:
    """Return the weight of each key for each query, in fp32.  [sequences * key heads, queries, keys]"""
    scores = torch.bmm(q.to(torch.float32, copy=True).mul_(scale), k.float().transpose(1, 2))
    num_sequences, num_queries = block.shape
    scores.view(num_sequences, -1, num_queries, scores.shape[1] // num_queries, scores.shape[2]).add_(block.mask)
    return scores.softmax(-1)


def _split(states: Tensor, shape: tuple[int, int], key_heads: int) -> Tensor:
    """Return [sequences * key heads, length * heads per key head, dim] of states  # [sequences * length, heads, dim]"""
    parts = states.view(*shape, key_heads, -1, states.shape[-1])
    return parts.transpose(1, 2).reshape(shape[0] * key_heads, -1, states.shape[-1])


def _join(states: Tensor, shape: tuple[int, int]) -> Tensor:
    """Invert _split."""
    num_sequences, length = shape
    parts = states.view(num_sequences, len(states) // num_sequences, length, -1, states.shape[-1])
    return parts.transpose(1, 2).reshape(num_sequences * length, -1, states.shape[-1])
