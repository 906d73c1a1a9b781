"""AdamW over sharded fp32 parameters: its state from the first update, one step with clipping, and its learning
rate."""

import contextlib
import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from rljob_api.manifest.algorithm import Optimizer
from rljob_trainer.policy.sharding import fill_gradients, reshard

_HALF_LOSS_SCALE = 2.0**4
"""Keeps float16 gradients out of the denormal range, and below its maximum where a micro-batch has thousands of tokens
of weight 1. Divided out before the clip."""


def loss_scale(dtype: torch.dtype) -> float:
    """Return the factor of every loss before its backward pass in the compute `dtype`."""
    return _HALF_LOSS_SCALE if dtype == torch.float16 else 1.0


def build_optimizer(model: nn.Module, settings: Optimizer) -> torch.optim.AdamW:
    """Return AdamW of what is trained in `model`, with the state of step 0. Otherwise a checkpoint of a new optimizer
    would save step 1. Norms and biases do not decay."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    decaying = [parameter for name, parameter in trained if decays(name, parameter)]
    others = [parameter for name, parameter in trained if not decays(name, parameter)]
    groups = [(decaying, settings.weight_decay), (others, 0.0)]
    optimizer = torch.optim.AdamW(
        [{"params": parameters, "weight_decay": decay} for parameters, decay in groups if parameters],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        fused=True,
    )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
    return optimizer


@contextlib.contextmanager
def keeping_settings(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within, a state may be loaded: the settings stay those of this job, not those that the checkpoint has."""
    settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    yield
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether the parameter is a matrix. The biases of a layer's experts are one parameter with two dimensions."""
    return parameter.dim() > 1 and not name.endswith("bias")


def update(
    model: nn.Module,
    optimizer: torch.optim.AdamW,
    settings: Optimizer,
    denominator: float,
    rate: float,
    dtype: torch.dtype,
) -> float:
    """Run one update of a sharded model with its gradients over `denominator`; with 0, only clear them. Return the norm
    before the clip. `dtype`: of the computation."""
    if not denominator:
        optimizer.zero_grad()
        return 0.0
    reshard(model)
    fill_gradients(model)
    return step(optimizer, divisor=denominator * loss_scale(dtype), max_norm=settings.max_grad_norm, rate=rate)


def step(optimizer: torch.optim.AdamW, *, divisor: float, max_norm: float | None, rate: float) -> float:
    """Divide the gradients by `divisor`, clip them to the global `max_norm`, and step. Return the norm before the clip.
    Every parameter that requires a gradient must have one.

    If the norm is not finite, nothing changes but the gradients, which are cleared in any case.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    shards = [p.grad.to_local() for p in parameters if isinstance(p.grad, DTensor)]
    # Of shards in host memory, too, NCCL sums a number on the device.
    squares = torch.stack(torch._foreach_norm(shards)).double().square().sum().to(parameters[0].device_mesh.device_type)
    dist.all_reduce(squares)
    norm = math.sqrt(squares.item()) / divisor
    if math.isfinite(norm):
        factor = (1.0 if max_norm is None or norm <= max_norm else max_norm / norm) / divisor
        if factor != 1:
            torch._foreach_mul_(shards, factor)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    optimizer.zero_grad()
    return norm


def learning_rate(optimizer: Optimizer, update: int, total_updates: int) -> float:
    """Return the rate of the 0-based `update`. A warm-up ends at the peak, linear and cosine at peak * min_ratio.

    It follows from the update's index and the job's length alone, so resume is exact. If schedule.steps changes while
    the job runs, each later update uses the rate of a job with the new length: a linear decay at 50 of 100 steps is at
    half of its peak; once the job has 200 steps, it is at three quarters.
    """
    peak = optimizer.learning_rate
    if update < optimizer.warmup_steps:
        return peak * (update + 1) / optimizer.warmup_steps
    if optimizer.schedule == "constant":
        return peak
    num_decay = max(1, total_updates - optimizer.warmup_steps)
    progress = min(1.0, (update - optimizer.warmup_steps) / num_decay)
    remaining = 1 - progress if optimizer.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return peak * (optimizer.min_ratio + (1 - optimizer.min_ratio) * remaining)
