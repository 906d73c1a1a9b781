"""Log-probabilities of selected tokens from hidden states, without logits for other positions.

Owns the language-model head's forward and backward, in blocks of the vocabulary: each of the head's weights is read
once, and the gradient of each is written once. Invariant: of the logits one block exists, unless all are kept for the
backward pass. Else they are computed again there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rljob_inputs.memory.limits import HEAD_BLOCK_ROWS, LOGITS_BLOCK_BYTES, count_block_columns, count_block_rows
from rljob_inputs.models.config import LogitTransform
from rljob_trainer.policy.compilation import CompiledLayers

_IDENTITY = LogitTransform()


@dataclass(frozen=True)
class Head:
    """How logits are computed, and how many."""

    logits_dtype: torch.dtype | None = None
    """Dtype of hidden @ weight.T; its gradients have that of the hidden states. None: that of the hidden states."""
    compiled: "Arithmetic | None" = None
    """None: without compilation."""
    kept_bytes: int = LOGITS_BLOCK_BYTES
    """Logits of at most this size are kept for the backward pass, which changes them: it runs once."""


_PLAIN = Head()


def selected_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float | Tensor,
    entropy_gradient: bool = False,
    transform: LogitTransform = _IDENTITY,
    head: Head = _PLAIN,
) -> tuple[Tensor, Tensor]:  # as `targets`, [targets]
    """Return log-probability and entropy of softmax(transform(hidden @ weight.T) / temperature) at each target.
    In fp32.

    hidden  # [targets, hidden]    weight  # [vocabulary, hidden]    targets  # [targets]
    temperature  # of all targets, or [targets]

    Targets of [targets, n] are n tokens for each hidden state, whose log-probabilities have the same shape.
    """
    dtype = head.logits_dtype or hidden.dtype
    num_bytes = len(targets) * len(weight) * dtype.itemsize
    keeps = torch.is_grad_enabled() and num_bytes <= head.kept_bytes
    arithmetic = head.compiled or Arithmetic()
    if isinstance(temperature, Tensor):
        temperature = temperature[:, None]  # [targets, 1]
    chosen = targets if targets.dim() == 2 else targets[:, None]
    arguments = (hidden, weight, chosen, temperature, entropy_gradient, transform, dtype, arithmetic, keeps)
    logprobs, entropy = _SelectedLogProbs.apply(*arguments)
    return logprobs.view_as(targets), entropy


class _SelectedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float | Tensor,
        entropy_gradient: bool,
        transform: LogitTransform,
        dtype: torch.dtype,
        arithmetic: "Arithmetic",
        keeps: bool,
    ) -> tuple[Tensor, Tensor]:
        kept, found = list[Tensor](), list[tuple[Tensor, ...]]()
        for columns in _blocks(hidden, weight, dtype):
            logits = _logits(hidden, weight[columns], dtype)  # [targets, block]
            found.append(arithmetic.reduce(logits, targets - columns.start, temperature, transform))
            if keeps:
                kept.append(logits)
            del logits
        chosen, normalizers, means = (torch.stack(each) for each in zip(*found, strict=True))  # [blocks, targets, ...]
        log_normalizers = normalizers.logsumexp(0)
        logprobs = chosen.sum(0) - log_normalizers[:, None]
        entropy = log_normalizers - (means * (normalizers - log_normalizers).exp()).sum(0)
        ctx.save_for_backward(hidden, weight, targets, log_normalizers, entropy, *kept)
        ctx.temperature, ctx.transform, ctx.entropy_gradient = temperature, transform, entropy_gradient
        ctx.dtype, ctx.arithmetic = dtype, arithmetic
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_normalizers, entropy, *kept = ctx.saved_tensors
        by_entropy = (entropy, grad_entropy) if ctx.entropy_gradient else (None, None)
        grad_hidden: Tensor | None = None
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None  # a frozen head has no gradient
        blocks = _blocks(hidden, weight, ctx.dtype)
        for i, columns in enumerate(blocks):
            part = weight[columns]
            grad = kept[i] if kept else _logits(hidden, part, ctx.dtype)
            of_block = (grad, targets - columns.start, log_normalizers, grad_logprobs, *by_entropy)
            ctx.arithmetic.differentiate(*of_block, ctx.temperature, ctx.transform)
            grad = grad.to(hidden.dtype)
            if grad_weight is not None:
                torch.mm(grad.T, hidden, out=grad_weight[columns])
            grad_hidden = grad @ part if len(blocks) == 1 else _add(grad_hidden, grad, part)
            del grad, of_block
        assert grad_hidden is not None, "a vocabulary has a block"
        return grad_hidden.to(hidden.dtype), grad_weight, *[None] * 7


def _logits(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return hidden @ weight.T, computed in `dtype`, without a copy of all weights in it.  [targets, block]

    Numbers of 16 bits have exact products in fp32, so this is what vLLM computes with the same head_dtype.
    """
    if hidden.dtype == dtype:
        return hidden @ weight.T
    if hidden.is_cuda:
        return torch.mm(hidden, weight.T, out_dtype=dtype)
    logits, hidden = hidden.new_empty(len(hidden), len(weight), dtype=dtype), hidden.to(dtype)
    for start in range(0, len(weight), HEAD_BLOCK_ROWS):
        block = slice(start, start + HEAD_BLOCK_ROWS)
        logits[:, block] = hidden @ weight[block].to(dtype).T
    return logits


def _add(total: Tensor | None, grad: Tensor, weight: Tensor) -> Tensor:
    """Return total + grad @ weight, in fp32.  [targets, hidden]"""
    is_wide = grad.is_cuda and grad.dtype != torch.float32
    product = torch.mm(grad, weight, out_dtype=torch.float32) if is_wide else grad @ weight
    return product.float() if total is None else total.add_(product)


def _reduce(
    logits: Tensor, targets: Tensor, temperature: float | Tensor, transform: LogitTransform
) -> tuple[Tensor, Tensor, Tensor]:  # as `targets`, [targets], [targets]
    """Return of a block: the scaled logits of the targets, 0 if another block has them; the log of the sum of all
    exponentials; and the mean of the scaled logits by the block's own softmax."""
    scaled = _scaled(logits, temperature, transform)  # [targets, block] fp32
    is_here, column = _find(targets, logits)
    chosen = scaled.gather(1, column).where(is_here, 0)
    normalizers = scaled.logsumexp(dim=1)
    if torch.compiler.is_compiling():  # what is summed up is small, so that the sum of few digits loses less
        below = scaled - normalizers[:, None]
        return chosen, normalizers, normalizers + (below.exp() * below).sum(dim=1)
    probabilities = (scaled - normalizers[:, None]).exp_()
    return chosen, normalizers, probabilities.mul_(scaled).sum(dim=1)


def _differentiate(
    logits: Tensor,
    targets: Tensor,
    log_normalizers: Tensor,
    grad_logprobs: Tensor,
    entropy: Tensor | None,
    grad_entropy: Tensor | None,
    temperature: float | Tensor,
    transform: LogitTransform,
) -> None:
    """Replace the logits of a block by their gradients. `entropy`: None if it has no gradient."""
    scaled = _scaled(logits, temperature, transform)
    slope = _slope(scaled, temperature, transform)
    probabilities = scaled.sub_(log_normalizers[:, None]).exp()
    grad = probabilities * -grad_logprobs.sum(1, keepdim=True)
    is_here, column = _find(targets, logits)
    at_target = grad_logprobs.where(is_here, 0)
    if torch.compiler.is_compiling():  # comparisons become part of the only loop; scattering would be another one
        columns = torch.arange(logits.shape[1], device=logits.device)
        for own, place in zip(at_target.split(1, 1), column.split(1, 1), strict=True):
            grad = grad + own.where(columns == place, 0)
    else:
        grad.scatter_add_(1, column, at_target)
    if entropy is not None and grad_entropy is not None:  # dH/dz = -p (log p + H)
        grad.sub_(scaled.add_(entropy[:, None]).mul_(probabilities).mul_(grad_entropy[:, None]))
    logits.copy_(grad.mul_(slope))


def _reduce_in_rows(logits: Tensor, targets: Tensor, *settings: Any) -> tuple[Tensor, ...]:
    if torch.compiler.is_compiling():
        return _reduce(logits, targets, *settings)
    parts = [_reduce(logits[rows], targets[rows], *_select(settings, rows)) for rows in _rows(logits)]
    return tuple(torch.cat(each) for each in zip(*parts, strict=True))


def _differentiate_in_rows(logits: Tensor, *others: Any) -> None:
    if torch.compiler.is_compiling():
        _differentiate(logits, *others)
        return
    for rows in _rows(logits):
        _differentiate(logits[rows], *_select(others, rows))


def _select(values: tuple[Any, ...], rows: slice) -> list[Any]:
    """Return the rows of those that have some."""
    return [each[rows] if isinstance(each, Tensor) else each for each in values]


@dataclass(frozen=True)
class Arithmetic:
    """What is computed for each logit of a block, in fp32."""

    reduce: Callable[..., tuple[Tensor, ...]] = _reduce_in_rows
    differentiate: Callable[..., None] = _differentiate_in_rows


def compile_arithmetic(compiled: CompiledLayers) -> Arithmetic:
    """Return the arithmetic as loops of the compiler, which write no fp32 value of a block, but for limited logits."""
    return Arithmetic(
        compiled.guard(torch.compile(_reduce_in_rows, dynamic=True), _reduce_in_rows),
        compiled.guard(torch.compile(_differentiate_in_rows, dynamic=True), _differentiate_in_rows),
    )


def _find(targets: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:  # bool, int64; as `targets`
    """Return whether the block has the target, and a column of the block, which is the target's if it has."""
    last = logits.shape[1] - 1
    return (targets >= 0) & (targets <= last), targets.clamp(0, last)


def _scaled(logits: Tensor, temperature: float | Tensor, transform: LogitTransform) -> Tensor:
    scaled = logits.to(torch.float32, copy=True)
    if transform.factor != 1:
        scaled.mul_(transform.factor)
    if transform.limit is not None:
        scaled.div_(transform.limit).tanh_().mul_(transform.limit)
    return scaled if isinstance(temperature, float) and temperature == 1 else scaled.div_(temperature)


def _slope(scaled: Tensor, temperature: float | Tensor, transform: LogitTransform) -> Tensor | float:
    """Return the derivative of what `_scaled` returns by the logits.  [targets, block], or the same for all"""
    factor = transform.factor / temperature
    if transform.limit is None:
        return factor
    return scaled.mul(temperature / transform.limit).square_().neg_().add_(1).mul_(factor)


def _blocks(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> list[slice]:
    """Return blocks of the vocabulary."""
    size = count_block_columns(len(hidden), len(weight), dtype.itemsize)
    return [slice(start, min(start + size, len(weight))) for start in range(0, len(weight), size)]


def _rows(logits: Tensor) -> list[slice]:
    """Return blocks of the targets, whose values in fp32 stay in a cache."""
    num_rows = count_block_rows(logits.shape[1], on_cpu=logits.device.type == "cpu")
    return [slice(start, start + num_rows) for start in range(0, max(1, len(logits)), num_rows)]
