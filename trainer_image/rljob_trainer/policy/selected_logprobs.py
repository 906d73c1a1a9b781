"""Log-probabilities of selected tokens from hidden states, without logits for other positions.

Owns the language-model head's forward and backward. Invariant: at most KEPT_LOGITS_BYTES of logits exist at any time,
and no fp32 copy of all these. With more targets, the backward pass recomputes the logits in chunks.
"""

from typing import Any

import torch
from torch import Tensor

from rljob_inputs.memory.limits import BLOCK_ROWS, DEVICE_BLOCK_ROWS, HEAD_BLOCK_ROWS, KEPT_LOGITS_BYTES
from rljob_inputs.models.config import LogitTransform

_IDENTITY = LogitTransform()


def selected_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float | Tensor,
    entropy_gradient: bool = False,
    transform: LogitTransform = _IDENTITY,
    logits_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # [targets], [targets]
    """Return log-probability and entropy of softmax(transform(hidden @ weight.T) / temperature) at each target.
    In fp32.

    hidden  # [targets, hidden]    weight  # [vocabulary, hidden]    targets  # [targets]
    temperature  # of all targets, or [targets]
    `logits_dtype`: of hidden @ weight.T; its gradients have the dtype of `hidden`. None: that of `hidden`.
    """
    dtype = logits_dtype or hidden.dtype
    arguments = (hidden, weight, targets, temperature, entropy_gradient, transform, dtype)
    logprobs, entropy = _SelectedLogProbs.apply(*arguments)
    return logprobs, entropy


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
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        log_normalizers, entropy = torch.empty_like(logprobs), torch.empty_like(logprobs)
        chunks = _chunks(hidden, weight, dtype)
        logits = hidden.new_empty(0)
        for chunk in chunks:
            logits = _logits(hidden[chunk], weight, dtype)  # [chunk, vocabulary]
            for block in _blocks(logits):
                rows = slice(chunk.start + block.start, chunk.start + block.stop)
                own = temperature if isinstance(temperature, float) else temperature[rows, None]
                scaled = _scaled(logits[block], own, transform)  # [block, vocabulary] fp32
                chosen = scaled.gather(1, targets[rows, None]).squeeze(1)
                log_normalizers[rows] = normalizers = scaled.logsumexp(dim=1)
                logprobs[rows] = chosen - normalizers
                probabilities = (scaled - normalizers[:, None]).exp_()
                entropy[rows] = normalizers - probabilities.mul_(scaled).sum(dim=1)
        kept = logits if len(chunks) == 1 else None
        ctx.save_for_backward(hidden, weight, targets, log_normalizers, entropy, kept)
        ctx.temperature, ctx.transform, ctx.entropy_gradient = temperature, transform, entropy_gradient
        ctx.dtype = dtype
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_normalizers, entropy, kept = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        # Chunks add up in fp32; a single chunk needs no sum.
        needs_weight = ctx.needs_input_grad[1]  # a frozen head has no gradient
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight and kept is None else None
        for chunk in _chunks(hidden, weight, ctx.dtype):
            grad_logits = kept.clone() if kept is not None else _logits(hidden[chunk], weight, ctx.dtype)
            for block in _blocks(grad_logits):
                rows = slice(chunk.start + block.start, chunk.start + block.stop)
                own = ctx.temperature if isinstance(ctx.temperature, float) else ctx.temperature[rows, None]
                scaled = _scaled(grad_logits[block], own, ctx.transform)
                slope = _slope(scaled, own, ctx.transform)
                probabilities = scaled.sub_(log_normalizers[rows, None]).exp()
                grad = probabilities * -grad_logprobs[rows, None]
                grad.scatter_add_(1, targets[rows, None], grad_logprobs[rows, None])
                if ctx.entropy_gradient:  # dH/dz = -p (log p + H)
                    scaled.add_(entropy[rows, None]).mul_(probabilities).mul_(grad_entropy[rows, None])
                    grad.sub_(scaled)
                grad_logits[block] = grad.mul_(slope)
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden[chunk] = grad_logits @ weight
            if needs_weight:
                update = grad_logits.T @ hidden[chunk]
                grad_weight = update if grad_weight is None else grad_weight.add_(update)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), *[None] * 5


def _logits(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return hidden @ weight.T, computed in `dtype`, without a copy of all weights in it.  [rows, vocabulary]

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


def _scaled(logits: Tensor, temperature: float | Tensor, transform: LogitTransform) -> Tensor:
    scaled = logits.to(torch.float32, copy=True)
    if transform.factor != 1:
        scaled.mul_(transform.factor)
    if transform.limit is not None:
        scaled.div_(transform.limit).tanh_().mul_(transform.limit)
    return scaled if isinstance(temperature, float) and temperature == 1 else scaled.div_(temperature)


def _slope(scaled: Tensor, temperature: float | Tensor, transform: LogitTransform) -> Tensor | float:
    """Return the derivative of what `_scaled` returns by the logits.  [block, vocabulary], or the same for all"""
    factor = transform.factor / temperature
    if transform.limit is None:
        return factor
    return scaled.mul(temperature / transform.limit).square_().neg_().add_(1).mul_(factor)


def _chunks(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> list[slice]:
    num_rows = max(1, KEPT_LOGITS_BYTES // (weight.shape[0] * dtype.itemsize))
    return [slice(start, min(start + num_rows, len(hidden))) for start in range(0, len(hidden), num_rows)]


def _blocks(logits: Tensor) -> list[slice]:
    num_rows = BLOCK_ROWS if logits.device.type == "cpu" else DEVICE_BLOCK_ROWS
    return [slice(start, min(start + num_rows, len(logits))) for start in range(0, len(logits), num_rows)]
