"""Log-probabilities of selected tokens from hidden states, without logits for other positions.

Owns the language-model head's forward and backward. Invariant: no fp32 copy of all logits exists at any time. With many
targets, the backward pass recomputes the logits in chunks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rljob_inputs.memory.limits import BLOCK_ROWS, DEVICE_BLOCK_ROWS, KEPT_LOGITS_BYTES


def selected_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:  # [targets], [targets]
    """Return log-probability and entropy of softmax(hidden @ weight.T / temperature) at each target, in fp32.

    hidden  # [targets, hidden]    weight  # [vocabulary, hidden]    targets  # [targets]
    """
    logprobs, entropy = _SelectedLogProbs.apply(hidden, weight, targets, temperature, entropy_gradient)
    return logprobs, entropy


class _SelectedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        log_normalizers, entropy = torch.empty_like(logprobs), torch.empty_like(logprobs)
        chunks = _chunks(hidden, weight)
        logits = hidden.new_empty(0)
        for chunk in chunks:
            logits = hidden[chunk] @ weight.T  # [chunk, vocabulary]
            for block in _blocks(logits):
                rows = slice(chunk.start + block.start, chunk.start + block.stop)
                scaled = _scaled(logits[block], temperature)  # [block, vocabulary] fp32
                chosen = scaled.gather(1, targets[rows, None]).squeeze(1)
                log_normalizers[rows] = normalizers = scaled.logsumexp(dim=1)
                logprobs[rows] = chosen - normalizers
                probabilities = (scaled - normalizers[:, None]).exp_()
                entropy[rows] = normalizers - probabilities.mul_(scaled).sum(dim=1)
        kept = logits if len(chunks) == 1 else None
        ctx.save_for_backward(hidden, weight, targets, log_normalizers, entropy, kept)
        ctx.temperature, ctx.entropy_gradient = temperature, entropy_gradient
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
        for chunk in _chunks(hidden, weight):
            grad_logits = kept.clone() if kept is not None else hidden[chunk] @ weight.T
            for block in _blocks(grad_logits):
                rows = slice(chunk.start + block.start, chunk.start + block.stop)
                scaled = _scaled(grad_logits[block], ctx.temperature).sub_(log_normalizers[rows, None])
                probabilities = scaled.exp()
                grad = probabilities * -grad_logprobs[rows, None]
                grad.scatter_add_(1, targets[rows, None], grad_logprobs[rows, None])
                if ctx.entropy_gradient:  # dH/dz = -p (log p + H)
                    scaled.add_(entropy[rows, None]).mul_(probabilities).mul_(grad_entropy[rows, None])
                    grad.sub_(scaled)
                grad_logits[block] = grad.div_(ctx.temperature)
            grad_hidden[chunk] = grad_logits @ weight
            if needs_weight:
                update = grad_logits.T @ hidden[chunk]
                grad_weight = update if grad_weight is None else grad_weight.add_(update)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    scaled = logits.to(torch.float32, copy=True)
    return scaled if temperature == 1 else scaled.div_(temperature)


def _chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    num_rows = max(1, KEPT_LOGITS_BYTES // (weight.shape[0] * hidden.element_size()))
    return [slice(start, min(start + num_rows, len(hidden))) for start in range(0, len(hidden), num_rows)]


def _blocks(logits: Tensor) -> list[slice]:
    num_rows = BLOCK_ROWS if logits.device.type == "cpu" else DEVICE_BLOCK_ROWS
    return [slice(start, min(start + num_rows, len(logits))) for start in range(0, len(logits), num_rows)]
