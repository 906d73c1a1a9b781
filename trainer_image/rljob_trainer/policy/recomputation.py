"""Recomputes the activations of layers in the backward pass: spec.trainer.gradientCheckpointing.

transformers' own switch needs modules in training mode, which would also turn on the dropout of their configuration.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import _RECOMPUTE, CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from rljob_inputs.memory.trainer import Recomputation

_PRODUCTS = {"aten::mm": 1, "aten::addmm": 2, "aten::_grouped_mm": 1}
"""Matrix products, the last one of experts, with the number of the argument [..., inner, outer]. Not bmm, whose results
are the recurrences of hybrids and the scores of eager attention, which are long."""
_ATTENTION = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "torch_attn::_varlen_attn",
)
_CHEAP_RATIO = 8
"""A product whose result is this many times wider than what it sums over costs little for what it takes: those of
adapters."""

Forward = Callable[..., Any]


def recompute(forward: Forward, choice: Recomputation) -> Forward:
    """Return `forward` of a layer, which keeps what `choice` says. Use it before the layer is an FSDP unit: then the
    parameters are gathered once for the second forward and the backward pass."""
    if choice == "none":
        return forward
    if choice == "full":
        return partial(checkpoint, forward, use_reentrant=False)
    return partial(checkpoint, forward, use_reentrant=False, context_fn=_build_contexts)


def _build_contexts() -> tuple[Any, Any]:
    """Return the contexts of one forward pass and of its repetition."""

    def choose(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        schema = getattr(operator, "_schema", None)
        if schema is not None and schema.is_mutable:
            for argument, value in zip(schema.arguments, args, strict=False):
                if argument.is_write and isinstance(value, Tensor):
                    _forget(first.storage, value)
        return _choose(operator, args)

    first, second = create_selective_checkpoint_contexts(choose)
    return first, second


def _forget(kept: dict[Any, dict[int, Any]], changed: Tensor) -> None:
    """Compute again what was kept and then changed in place, such as a product to which a bias is added."""
    memory = changed.untyped_storage()._cdata
    for results in kept.values():
        for index, result in results.items():
            values = [getattr(part, "val", None) for part in (result if isinstance(result, tuple) else (result,))]
            if any(isinstance(each, Tensor) and each.untyped_storage()._cdata == memory for each in values):
                results[index] = _RECOMPUTE


def _choose(operator: Any, args: tuple[Any, ...]) -> CheckpointPolicy:
    """Return whether selective keeps the operator's result: most of the arithmetic is in few results."""
    is_kept = operator.name() in _ATTENTION
    if (place := _PRODUCTS.get(operator.name())) is not None:
        inner, outer = args[place].shape[-2:]
        is_kept = _CHEAP_RATIO * inner > outer
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
