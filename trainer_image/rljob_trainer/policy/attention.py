"""Which attention a model uses on a device, the layout of rows that it allows, and what a forward pass gives it.

    packed   one line of trees without padding. Each run of tokens is a sequence of queries with a sequence of keys, by
             cumulative lengths: torch's varlen attention on GPUs, one call per sequence on CPUs
    others   transformers' implementations: dense masks for trees (sdpa, eager), lengths of rows (flash_attention_2)

Packed attention needs no mask of [tokens, tokens]. A prompt and its first completion are one causal sequence. A further
completion of the same prompt is a sequence of its queries alone, whose keys are those of the prompt and its own; for it
the keys are copied, which costs far less than the prompt's layers would.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rljob_api.errors import UserError
from rljob_trainer.policy.arrays import integers, to_device
from rljob_trainer.policy.layout import MASKED_TREES, PACKED_ROWS, PACKED_TREES, PLAIN, Layout, MicroBatch

PACKED = "rljob_packed"
"""Name of our implementation in transformers."""
_MAX_HEAD_DIM = 256
_HEAD_DIM_MULTIPLE = 8
_MIN_CAPABILITY = (8, 0)
"""Minimum of torch's flash attention: compute capability, Ampere."""


class Segments(NamedTuple):
    """The sequences of a packed line. The tensors are on the device."""

    query_ends: Tensor
    """[sequences + 1] int32, cumulative."""
    key_ends: Tensor
    """[sequences + 1] int32, cumulative."""
    keys: Tensor | None
    """[keys] Column of each key. None: those of the line, in order."""
    max_queries: int
    max_keys: int


def install(decoder: Any, wanted: str, *, dtype: torch.dtype, device: torch.device) -> None:
    """Give `decoder`, built with `initial_attention`, the attention that spec.trainer.attention asks for. Raise
    UserError if that is packed, and the model or the device does not support it."""
    if wanted not in ("auto", "packed") or (wanted == "auto" and device.type == "cpu"):
        return
    obstacle = _obstacle(decoder, dtype, device)
    if obstacle is None:
        _register()
        decoder.set_attn_implementation(PACKED)
    elif wanted == "packed":
        raise UserError(f"spec.trainer.attention: packed is not possible, because {obstacle}; use auto or sdpa")


def initial_attention(kind: Any, config: Any, wanted: str) -> str:
    """Return the implementation with which transformers builds a network of the class `kind`. Raise UserError for sdpa
    if the model limits its attention scores, which sdpa does not."""
    is_limited = _limits_scores(config.get_text_config())
    if wanted == "sdpa" and is_limited:
        raise UserError("limits its attention scores, which sdpa does not; set spec.trainer.attention to auto or eager")
    if wanted not in ("auto", "packed"):
        return wanted
    # gpt-oss has sinks, which sdpa does not have.
    return "sdpa" if getattr(kind, "_supports_sdpa", True) and not is_limited else "eager"


def find_layout(decoder: Any) -> Layout:
    """Return how rows may share micro-batches. Trees need full attention in every layer, and so do packed rows: windows
    and recurrences count tokens of a line, not of a row."""
    config = decoder.config
    if not _has_full_attention(decoder):
        return PLAIN
    layouts = {
        PACKED: PACKED_TREES,
        "flash_attention_2": PACKED_ROWS,
        "sdpa": MASKED_TREES,
        "eager": MASKED_TREES,
    }
    return layouts.get(config._attn_implementation, PLAIN)


def attention_inputs(config: Any, batch: MicroBatch, *, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Return the keyword arguments of the model with which each token sees its own branch and prompt only. Plain lines
    need none: the causal mask hides padding on the right."""
    if config._attn_implementation == PACKED:
        segments = find_segments(batch.trees[0], batch.branches[0], device)
        return {"position_ids": integers(batch.position_ids, device), "packed": segments}
    if batch.is_plain:
        return {}
    if config._attn_implementation == "flash_attention_2":
        segments = find_segments(batch.trees[0], batch.branches[0], device)
        return {
            "position_ids": integers(batch.position_ids, device),
            "cu_seq_lens_q": segments.query_ends,
            "cu_seq_lens_k": segments.key_ends,
            "max_length_q": segments.max_queries,
            "max_length_k": segments.max_keys,
        }
    return {
        "position_ids": integers(batch.position_ids, device),
        "attention_mask": _dense_mask(batch, dtype, device),
    }


def find_segments(
    trees: NDArray[np.int32], branches: NDArray[np.int32], device: torch.device
) -> Segments:  # trees, branches: [tokens]
    """Return the sequences of a line without padding."""
    is_new_tree = np.diff(trees, prepend=-1) != 0
    # A first completion continues the sequence of its prompt, which has at least one token.
    is_start = is_new_tree | ((np.diff(branches, prepend=0) != 0) & (branches > 1))
    starts = np.flatnonzero(is_start)
    ends = np.append(starts[1:], len(trees))
    tree_starts = np.flatnonzero(is_new_tree)
    # Tokens of the prompt of each sequence's tree: they come first, and have branch 0.
    num_prompt = np.add.reduceat((branches == 0).astype(np.int64), tree_starts)
    tree_of = np.searchsorted(tree_starts, starts, side="right") - 1
    is_shared = branches[starts] > 1
    num_queries = ends - starts
    num_keys = num_queries + np.where(is_shared, num_prompt[tree_of], 0)
    keys = None
    if is_shared.any():
        keys = np.concatenate(
            [
                columns
                for start, end, shared, tree in zip(starts, ends, is_shared, tree_of, strict=True)
                for columns in (
                    *([np.arange(tree_starts[tree], tree_starts[tree] + num_prompt[tree])] if shared else []),
                    np.arange(start, end),
                )
            ]
        )
    return Segments(
        query_ends=_cumulative(num_queries, device),
        key_ends=_cumulative(num_keys, device),
        keys=None if keys is None else integers(keys, device),
        max_queries=int(num_queries.max()),
        max_keys=int(num_keys.max()),
    )


# Compiled layers call it as it is: its shapes change with every line.
@torch.compiler.disable
def packed_attention(
    module: Any,
    query: Tensor,  # [1, heads, tokens, dim]
    key: Tensor,  # [1, key heads, tokens, dim]
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: Segments,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:  # [1, tokens, heads, dim]
    """transformers' interface of an attention function."""
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))  # [tokens, heads, dim]
    if packed.keys is not None:
        key, value = _Copies.apply(key, packed.keys), _Copies.apply(value, packed.keys)
    attend = _attend_by_sequence if query.device.type == "cpu" else _attend_on_gpu
    return attend(query, key, value, packed, scaling)[None], None


def _attend_on_gpu(query: Tensor, key: Tensor, value: Tensor, packed: Segments, scaling: float | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    found = varlen_attn(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        packed.query_ends,
        packed.key_ends,
        packed.max_queries,
        packed.max_keys,
        scale=scaling,
        window_size=(-1, 0),  # causal; the last query sees the last key
        enable_gqa=key.shape[1] != query.shape[1],
    )
    assert isinstance(found, Tensor)
    return found


def _attend_by_sequence(query: Tensor, key: Tensor, value: Tensor, packed: Segments, scaling: float | None) -> Tensor:
    found = []
    query_ends, key_ends = packed.query_ends.tolist(), packed.key_ends.tolist()
    for i in range(len(query_ends) - 1):
        queries, keys = slice(query_ends[i], query_ends[i + 1]), slice(key_ends[i], key_ends[i + 1])
        parts = (query[queries], key[keys], value[keys])
        q, k, v = (part.transpose(0, 1)[None] for part in parts)  # [1, heads, sequence, dim]
        num_queries, num_keys = queries.stop - queries.start, keys.stop - keys.start
        mask = None
        if num_queries < num_keys:
            visible = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
            mask = visible.tril(num_keys - num_queries)
        result = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
        )
        found.append(result[0].transpose(0, 1))
    return torch.cat(found)


class _Copies(torch.autograd.Function):
    """states[columns], whose gradient adds up in fp32: a prompt's keys have many copies."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, columns: Tensor) -> Tensor:
        ctx.save_for_backward(columns)
        ctx.num_tokens = len(states)
        return states.index_select(0, columns)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (columns,) = ctx.saved_tensors
        total = gradient.new_zeros((ctx.num_tokens, *gradient.shape[1:]), dtype=torch.float32)
        return total.index_add_(0, columns, gradient.float()).to(gradient.dtype), None


def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED, packed_attention)


def _obstacle(decoder: Any, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why the model cannot use packed attention on `device`; None if it can."""
    config = decoder.config
    if not _has_full_attention(decoder):
        return "the model has layers without full attention"
    if not (getattr(decoder, "_supports_attention_backend", False) and getattr(decoder, "_supports_flash_attn", False)):
        return f"{type(decoder).__name__} passes nothing on to its attention"
    if _limits_scores(config):
        return "the model limits its attention scores"
    if device.type == "cpu":
        return None
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if dtype == torch.float32:
        return "flash attention needs trainer.dtype bfloat16 or float16"
    if head_dim > _MAX_HEAD_DIM or head_dim % _HEAD_DIM_MULTIPLE:
        return f"flash attention has no kernel for heads of {head_dim}"
    if torch.cuda.get_device_capability(device) < _MIN_CAPABILITY:
        return f"flash attention needs Ampere or newer, got {torch.cuda.get_device_name(device)}"
    return None


def _limits_scores(config: Any) -> bool:
    """Whether attention scores have a soft limit, as in Gemma 2."""
    return bool(getattr(config, "attn_logit_softcapping", None))


def _has_full_attention(decoder: Any) -> bool:
    config = decoder.config
    if getattr(decoder, "_is_stateful", False):
        return False
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        return False
    windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return bool(getattr(config, "layer_types", None) or not windowed)


def _dense_mask(batch: MicroBatch, dtype: torch.dtype, device: torch.device) -> Tensor:  # [lines, 1, query, key]
    trees = integers(batch.trees, device)  # [lines, length]
    branches = integers(batch.branches, device)
    length = trees.shape[1]
    visible = trees[:, :, None] == trees[:, None, :]  # [lines, query, key]
    visible &= (branches[:, None, :] == 0) | (branches[:, None, :] == branches[:, :, None])
    visible &= torch.ones(length, length, dtype=torch.bool, device=device).tril()
    mask = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, -math.inf)
    return mask[:, None]


def _cumulative(lengths: NDArray[np.int64], device: torch.device) -> Tensor:
    return to_device(np.concatenate([[0], np.cumsum(lengths)]), device, torch.int32)
