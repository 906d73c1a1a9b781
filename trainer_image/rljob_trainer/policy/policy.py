"""One rank of the policy: an FSDP2 module with its optimizer. Plain torch.distributed: no Ray, no HTTP.

Every method is a collective: all ranks call it in the same order, with plans of the same shape. Invariant: an update
depends only on parameters, optimizer state, its index and the plan.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rljob_api.manifest.job import RLJob
from rljob_trainer.algorithms.losses import SUMS, TokenBatch, grpo_loss
from rljob_trainer.policy.lr_schedule import learning_rate
from rljob_trainer.policy.micro_batches import MicroBatch, RankPlan
from rljob_trainer.policy.model_loading import ScoringModel, can_share_prompts, load_network, shard

log = logging.getLogger(__name__)

_GATHERED_SHARE_OF_DEVICE_MEMORY = 0.25
"""Parameters up to this share of a GPU's memory stay gathered from the first forward to the last backward."""
_PREFIX = "network."
"""Prefix of parameter names in ScoringModel; the rest is the Hugging Face name."""
_HALF_LOSS_SCALE = 2.0**12
"""Keeps float16 gradients out of the denormal range. Divided out before the clip."""


@dataclass(frozen=True)
class RankMetrics:
    """Metrics of one update. `sums` are reduced over the ranks, so every rank has the same."""

    sums: dict[str, float]
    grad_norm: float
    learning_rate: float


class Policy:
    def __init__(self, job: RLJob, model: str, device: torch.device) -> None:
        """`model`: the resolved source of spec.model: a folder, or hf://org/name."""
        self._spec, self._source, self.device = job.spec, model, device
        self.algorithm = job.spec.algorithm
        self.num_steps = job.spec.schedule.steps
        """May change (see lr_schedule)."""
        # Greedy sampling has no distribution; use the model's.
        self._temperature = job.spec.rollout.sampling.temperature or 1.0
        self.dtype: torch.dtype = getattr(torch, job.spec.trainer.dtype)
        torch.manual_seed(job.spec.schedule.seed + dist.get_rank())
        if device.type == "cpu":
            torch.set_flush_denormal(True)
        network = self._load(torch.float32)
        self.config, self.generation_config = network.config, getattr(network, "generation_config", None)
        self.can_share_prompts = can_share_prompts(network.config)
        self._keep_gathered = self._fits_gathered(network)
        self.model = self._shard(network)
        optimizer = self.algorithm.optimizer
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=optimizer.learning_rate,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.epsilon,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )
        _init_optimizer_state(self.optimizer)
        self.num_updates = 0
        # FSDP creates its streams in the first forward. Before that, parameters can only be gathered one by one.
        self._has_run_forward = False
        self.reference: ScoringModel | None = None
        if self.algorithm.kl.coefficient > 0:
            self.reference = self._shard(self._load(self.dtype)).requires_grad_(False).eval()

    def compute_logprobs(self, batches: list[MicroBatch]) -> list[Tensor]:
        """Return the log-probabilities of each micro-batch's targets, in fp32 on the CPU."""
        self._has_run_forward = True
        with torch.no_grad():
            return [self.model(batch, self._temperature)[0].cpu() for batch in batches]

    def update(self, plan: RankPlan) -> RankMetrics:
        """Run one optimizer update over one mini-batch. Without a token to train on, it changes nothing."""
        sums = torch.zeros(len(SUMS) + 1, dtype=torch.float64, device=self.device)
        references = self._reference_logprobs(plan)
        self._has_run_forward = True
        with torch.no_grad():
            for batch in plan.forward_only:
                sums += self._loss(batch, next(references))[1]
        for i, batch in enumerate(plan.train):
            self._expect_backward(is_last=i == len(plan.train) - 1)
            loss, terms = self._loss(batch, next(references))
            (loss * self._loss_scale).backward()
            sums += terms
        dist.all_reduce(sums)
        metrics = dict(zip((*SUMS, "num_tokens"), sums.tolist(), strict=True))
        total_updates = self.num_steps * self._spec.schedule.mini_batches
        rate = learning_rate(self.algorithm.optimizer, self.num_updates, total_updates)
        grad_norm = self._apply_gradients(rate) if metrics["num_tokens"] else 0.0
        self.optimizer.zero_grad()
        self.num_updates += 1
        return RankMetrics(metrics, grad_norm, rate)

    def gather_weights(self) -> dict[str, Tensor]:
        """Return all parameters in the compute dtype on rank 0's CPU, valid until the next update; {} on other ranks.

        The parameters stay gathered for the next forward, so publishing costs no extra transfer.
        """
        keep = dist.get_rank() == 0
        if self._keep_gathered and self._has_run_forward:
            for module in self._fsdp_modules():
                module.unshard()
            named = self.model.named_parameters() if keep else ()
            return {name.removeprefix(_PREFIX): parameter.detach().cpu() for name, parameter in named}
        self.reshard()
        weights = {}
        for name, parameter in self.model.named_parameters():
            shard = cast(DTensor, parameter.detach().to(self.dtype))
            tensor = shard.full_tensor()  # a collective
            if keep:
                weights[name.removeprefix(_PREFIX)] = tensor.cpu()
        return weights

    def reshard(self) -> None:
        """Free what the last forward gathered, so that parameters are the shards that the optimizer updates."""
        for module in self._fsdp_modules():
            module.reshard()

    def _fsdp_modules(self) -> list[FSDPModule]:
        return [module for module in self.model.modules() if isinstance(module, FSDPModule)]

    @property
    def _loss_scale(self) -> float:
        return _HALF_LOSS_SCALE if self.dtype == torch.float16 else 1.0

    def _loss(self, batch: MicroBatch, reference: Tensor | None) -> tuple[Tensor, Tensor]:
        logprobs, entropy = self.model(batch, self._temperature, bool(self.algorithm.entropy_coefficient))
        tokens = TokenBatch(
            advantages=self._tensor(batch.advantages),
            rollout_logprobs=self._tensor(batch.rollout_logprobs),
            old_logprobs=None if batch.old_logprobs is None else self._tensor(batch.old_logprobs),
            weights=self._tensor(batch.weights),
        )
        terms = grpo_loss(logprobs, entropy, reference, tokens, self.algorithm)
        num_tokens = (tokens.weights > 0).sum(dtype=torch.float64)
        return terms.loss, torch.cat([terms.sums, num_tokens[None]])

    def _reference_logprobs(self, plan: RankPlan) -> Iterator[Tensor | None]:
        batches = [*plan.forward_only, *plan.train]
        if self.reference is None:
            return iter([None] * len(batches))
        with torch.no_grad():
            return iter([self.reference(batch, self._temperature)[0] for batch in batches])

    def _expect_backward(self, *, is_last: bool) -> None:
        """Accumulate gradients on each rank without communication; the last backward reduces them once."""
        model = cast(FSDPModule, self.model)
        model.set_requires_gradient_sync(is_last)
        model.set_is_last_backward(is_last)
        if self._keep_gathered:
            model.set_reshard_after_backward(is_last)

    def _apply_gradients(self, rate: float) -> float:
        """Clip and step. Return the norm before the clip. Skip the step and log a warning if the norm is not finite."""
        shards = [p.grad.to_local() for p in self.model.parameters() if isinstance(p.grad, DTensor)]
        squares = torch.stack(torch._foreach_norm(shards)).double().square().sum()
        dist.all_reduce(squares)
        norm = math.sqrt(squares.item()) / self._loss_scale
        if not math.isfinite(norm):
            log.warning("update %d: the gradient's norm is %s; the update is skipped", self.num_updates, norm)
            return norm
        max_norm = self.algorithm.optimizer.max_grad_norm
        factor = 1.0 if max_norm is None or norm <= max_norm else max_norm / norm
        if factor / self._loss_scale != 1:
            torch._foreach_mul_(shards, factor / self._loss_scale)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return norm

    def _load(self, dtype: torch.dtype) -> Any:
        attention = self._spec.trainer.attention
        network = load_network(self._source, dtype=dtype, attention=attention, options=self.source_options)
        if self._spec.trainer.gradient_checkpointing:
            network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return network

    @property
    def source_options(self) -> dict[str, Any]:
        model = self._spec.model
        return {"revision": model.revision or "main", "trust_remote_code": model.trust_remote_code}

    def _shard(self, network: Any) -> ScoringModel:
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        return shard(network, mesh=mesh, dtype=self.dtype, keep_gathered=self._keep_gathered)

    def _fits_gathered(self, network: Any) -> bool:
        if self.device.type == "cpu":
            return True
        num_bytes = sum(parameter.numel() for parameter in network.parameters()) * self.dtype.itemsize
        total = torch.cuda.get_device_properties(self.device).total_memory
        return num_bytes <= _GATHERED_SHARE_OF_DEVICE_MEMORY * total

    def _tensor(self, values: Any) -> Tensor:
        return torch.from_numpy(values).to(self.device)


def _init_optimizer_state(optimizer: torch.optim.AdamW) -> None:
    """Give every parameter its state at step 0. Otherwise a checkpoint of a new optimizer would save step 1."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
