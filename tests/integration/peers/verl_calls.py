"""verl's own functions on given tensors. Runs in the peers' environment, and imports nothing of RLJob.

Tensors are [episodes, tokens] in fp64 unless a line says otherwise. A gradient is that of the log-probs.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import verl.utils.torch_functional
from torch import Tensor
from verl.trainer.config.algorithm import AlgoConfig, RolloutCorrectionConfig
from verl.trainer.distillation import losses
from verl.trainer.distillation.fsdp import losses as fsdp_losses
from verl.trainer.ppo import core_algos, metric_utils, rollout_corr_helper
from verl.workers.config import ActorConfig, DistillationLossConfig


def advantages(estimator: str, rewards: Tensor, mask: Tensor, groups: Tensor, **options: Any) -> Tensor:
    """groups  # [episodes]"""
    estimate = core_algos.get_adv_estimator_fn(estimator)
    found, _ = estimate(
        token_level_rewards=rewards, response_mask=mask, index=groups.numpy(), config=AlgoConfig(), **options
    )
    return found * mask


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    found, returns = core_algos.compute_gae_advantage_return(rewards, values, mask, gamma, lam)
    return found * mask, returns * mask


def policy_loss(
    mode: str,
    logprobs: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    level: str,
    max_tokens: int,
    clip: tuple[float, float, float] = (0.2, 0.2, 3.0),
    weights: Tensor | None = None,
    trained: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the loss and its gradient. `trained`: a part of `mask` that rejection has left, with the denominators of
    the whole."""
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        clip_ratio_low=clip[0],
        clip_ratio_high=clip[1],
        clip_ratio_c=clip[2],
        global_batch_info={
            "batch_num_tokens": mask.sum(),
            "global_batch_size": len(mask),
            "loss_scale_factor": max_tokens,
        },
    )
    logprobs = logprobs.clone().requires_grad_()  # two arguments may be one tensor
    loss, _ = core_algos.get_policy_loss_fn(mode)(
        old_log_prob=proximal,
        log_prob=logprobs,
        advantages=advantages,
        response_mask=mask if trained is None else trained,
        loss_agg_mode=level,
        config=config,
        rollout_is_weights=weights,
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.detach(), gradient


def reinforce_gradient(
    rollout: Tensor, logprobs: Tensor, advantages: Tensor, mask: Tensor, *, level: str, max_tokens: int, weights: Tensor
) -> Tensor:
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, global_batch_info={"loss_scale_factor": max_tokens}
    )
    logprobs = logprobs.clone().requires_grad_()  # two arguments may be one tensor
    loss, _ = core_algos.compute_policy_loss_reinforce(
        rollout, logprobs, advantages, mask, loss_agg_mode=level, config=config, rollout_is_weights=weights
    )
    return torch.autograd.grad(loss, logprobs)[0]


def kl(logprobs: Tensor, reference: Tensor, estimator: str) -> tuple[Tensor, Tensor]:
    logprobs = logprobs.clone().requires_grad_()  # two arguments may be one tensor
    found = core_algos.kl_penalty(logprobs, reference, estimator)
    return found.detach(), torch.autograd.grad(found.sum(), logprobs)[0]


def distillation(
    logprobs: Tensor, teacher: Tensor, mask: Tensor, *, limit: float, level: str, max_tokens: int
) -> tuple[Tensor, Tensor]:
    """Return the loss and its gradient of distillation by k1 as reward, on-policy."""
    scale = {"loss_agg_mode": level, "loss_scale_factor": max_tokens}
    actor = ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, **scale)
    loss_config = DistillationLossConfig(loss_mode="k1", loss_max_clamp=limit)
    counts = {"dp_size": 1, "batch_num_tokens": mask.sum(), "global_batch_size": len(mask)}
    data = {"response_mask": mask, "teacher_logprobs": teacher, "old_log_probs": logprobs, **counts}
    logprobs = logprobs.clone().requires_grad_()
    losses.no_padding_2_padding = lambda values, data: values  # the tensors are padded here
    loss, _ = losses.distillation_loss(
        actor, SimpleNamespace(distillation_loss=loss_config), {"log_probs": logprobs}, data
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.detach(), gradient


def top_distillation(
    logits: Tensor, tokens: Tensor, teacher: Tensor, mask: Tensor, *, limit: float, level: str, max_tokens: int
) -> tuple[Tensor, Tensor]:
    """Return the loss of forward_kl_topk as a supervised loss, and its gradient by the logits.

    logits  # [sampled, vocabulary]    tokens, teacher  # [sampled, k]    mask  # [episodes, tokens]
    """
    actor = ActorConfig(
        strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, loss_agg_mode=level, loss_scale_factor=max_tokens
    )
    loss_config = DistillationLossConfig(
        loss_mode="forward_kl_topk", loss_max_clamp=limit, log_prob_min_clamp=None, use_policy_gradient=False
    )
    config = SimpleNamespace(distillation_loss=loss_config)
    lengths = mask.sum(1).long().tolist()
    topk = [torch.nested.nested_tensor(list(each.split(lengths)), layout=torch.jagged) for each in (teacher, tokens)]
    logits = logits.clone().requires_grad_()
    found = fsdp_losses.compute_forward_kl_topk(logits[None], *topk, config, "thd")
    outputs = {
        name: torch.zeros_like(mask).masked_scatter(mask.bool(), each[0].float()) for name, each in found.items()
    }
    counts = {"dp_size": 1, "batch_num_tokens": mask.sum(), "global_batch_size": len(mask)}
    losses.no_padding_2_padding = lambda values, data: values  # the tensors are padded here
    loss, _ = losses.distillation_loss(actor, config, outputs, {"response_mask": mask, **counts})
    (gradient,) = torch.autograd.grad(loss, logits)
    return loss.detach(), gradient


def value_loss(values: Tensor, before: Tensor, returns: Tensor, mask: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    values = values.clone().requires_grad_()
    loss, _ = core_algos.compute_value_loss(values, returns, before, mask, clip, loss_agg_mode="token-mean")
    return loss.detach(), torch.autograd.grad(loss, values)[0]


def correction(preset: str, proximal: Tensor, rollout: Tensor, mask: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the weights (1 without any) and what rejection leaves of the mask. `preset`: a class method of
    RolloutCorrectionConfig with its `options`, or an empty text: `options` are the config's fields."""
    config = getattr(RolloutCorrectionConfig, preset)(**options) if preset else RolloutCorrectionConfig(**options)
    weights, left, _ = rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
        proximal,
        rollout,
        mask,
        rollout_is=config.rollout_is,
        rollout_is_threshold=config.rollout_is_threshold,
        rollout_rs=config.rollout_rs,
        rollout_rs_threshold=config.rollout_rs_threshold,
    )
    return mask if weights is None else weights.batch["rollout_is_weights"], left


def logprobs_and_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """logits  # [tokens, vocabulary]    targets  # [tokens]"""
    functional = verl.utils.torch_functional
    return functional.logprobs_from_logits_naive(logits, targets), functional.entropy_from_logits(logits)


def validation(prompts: list[list[float]], preds: list[list[str]], num_expected: int) -> dict[str, float]:
    """Return verl's metrics of validation for `acc`. [prompts][answers]; answers up to `num_expected` that are missing
    failed."""
    uids = [str(index) for index, values in enumerate(prompts) for _ in values]
    infos = {"acc": [value for values in prompts for value in values]}
    if preds:
        infos["pred"] = [pred for of_prompt in preds for pred in of_prompt]
    expected = {("set", str(index)): num_expected for index in range(len(prompts))}
    found = metric_utils.process_validation_metrics(["set"] * len(uids), uids, infos, expected_acc_counts=expected)
    return dict(found["set"]["acc"])


def votes(prompts: list[list[tuple[str, float]]]) -> list[float]:
    """Return verl's majority vote of each prompt, in the order of its answers."""
    listed = [[{"pred": text, "val": value} for text, value in answers] for answers in prompts]
    return [metric_utils.calc_maj_val(answers, "pred", "val") for answers in listed]
