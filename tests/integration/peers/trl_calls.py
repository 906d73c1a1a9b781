"""TRL's GRPOTrainer on given tensors. Runs in the peers' environment, and imports nothing of RLJob.

Its methods run with an object that has the least that they read: what a model would compute is given. Tensors are
[episodes, tokens] in fp64 unless a line says otherwise. A gradient is that of the log-probs.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl import chat_template_utils
from trl.trainer import sft_trainer
from trl.trainer.grpo_trainer import GRPOTrainer

_PAD = 0


def score(
    rewards: Tensor,
    *,
    group_size: int,
    lengths: list[int],
    proximal: Tensor,
    rollout: Tensor,
    weights: list[float],
    scale: str = "group",
    aggregation: str = "sum_then_normalize",
    mode: str = "token_truncate",
    cap: float | None = 3.0,
    floor: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the advantages [episodes] and the importance weights [episodes, tokens] or [episodes, 1].

    rewards  # [episodes, rewards], NaN for an invalid one
    """
    num_episodes, num_rewards = rewards.shape
    completions = [[1] * length for length in lengths]
    sampled = [row[:length].tolist() for row, length in zip(rollout, lengths, strict=True)]
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device=torch.device("cpu"), gather=lambda x: x, process_index=0),
        model=SimpleNamespace(training=True, is_gradient_checkpointing=False),
        args=SimpleNamespace(
            per_device_train_batch_size=num_episodes, steps_per_generation=1, gradient_accumulation_steps=1,
            gradient_checkpointing_kwargs=None,
        ),
        environment_factories=None, environments=None, tools=None, _is_vlm=False, pad_to_multiple_of=None,
        mask_truncated_completions=False, num_iterations=1, num_generations=group_size, beta=0.0,
        use_vllm=True, vllm_importance_sampling_correction=True, vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_max=cap, vllm_importance_sampling_clip_min=floor,
        multi_objective_aggregation=aggregation, scale_rewards=scale, reward_funcs=[None] * num_rewards,
        reward_func_names=[str(i) for i in range(num_rewards)], reward_weights=torch.tensor(weights),
        _tokenizer=SimpleNamespace(pad_token_id=_PAD),
        _metrics={"train": defaultdict(list)}, _logs=defaultdict(lambda: defaultdict(list)),
        _pending_extra_logs={}, _pending_metrics={},
        _generate=lambda prompts: ([[1]] * num_episodes, completions, None, completions, sampled, {}, None, None),
        _get_per_token_logps_and_entropies=lambda *_, **__: (proximal, None, None),
        _calculate_rewards=lambda *_: rewards,
    )  # fmt: skip
    trainer._logs |= {name: [] for name in ("prompt", "completion", "advantages")}
    torch.set_default_dtype(torch.float64)
    try:
        found = GRPOTrainer._generate_and_score_completions(trainer, [{"prompt": "p"} for _ in range(num_episodes)])
    finally:
        torch.set_default_dtype(torch.float32)
    return found["advantages"], found["importance_sampling_ratio"]


def loss(
    logprobs: Tensor,
    *,
    proximal: Tensor,
    reference: Tensor,
    advantages: Tensor,
    weights: Tensor,
    mask: Tensor,
    loss_type: str,
    level: str,
    clip: tuple[float, float],
    delta: float | None = None,
    beta: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the loss and its gradient. advantages  # [episodes]    weights: of `score`"""
    logprobs = logprobs.clone().requires_grad_()  # two arguments may be one tensor
    entropy = torch.zeros_like(logprobs)
    totals = SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1)
    trainer = SimpleNamespace(
        loss_type=loss_type, importance_sampling_level=level, epsilon_low=clip[0], epsilon_high=clip[1], beta=beta,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=delta, steps_per_generation=1),
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=True, aux_loss_enabled=False,
        vllm_importance_sampling_correction=True, current_gradient_accumulation_steps=1,
        max_completion_length=mask.shape[1], accelerator=totals, _entropy_bonus_enabled=False,
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, entropy, None),
    )  # fmt: skip
    completions = torch.ones(mask.shape, dtype=torch.long)
    inputs: dict[str, Any] = {
        "prompt_ids": completions[:, :1],
        "prompt_mask": completions[:, :1],
        "completion_ids": completions,
        "completion_mask": mask.long(),
        "advantages": advantages,
        "old_per_token_logps": proximal,
        "ref_per_token_logps": reference,
        "importance_sampling_ratio": weights,
        "num_items_in_batch": mask.sum(),
    }
    found = GRPOTrainer._compute_loss(trainer, None, inputs)
    return found.detach(), torch.autograd.grad(found, logprobs)[0]


def sft_loss(logprobs: Tensor, *, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return SFTTrainer's loss of labels where the mask is 1, and its gradient."""
    logprobs = logprobs.clone().requires_grad_()
    nothing = torch.zeros(())
    outputs = SimpleNamespace(log_probs=logprobs * mask, label_mask=mask, entropy=nothing, is_top1=nothing)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True), aux_loss_enabled=False, compute_loss_func=None, label_smoother=None,
        args=SimpleNamespace(loss_type="nll", average_tokens_across_devices=False),
        accelerator=SimpleNamespace(parallelism_config=None, gather_for_metrics=lambda x: x),
        _metrics={"train": defaultdict(list)}, _total_train_tokens=0, _tp_size=1,
    )  # fmt: skip
    inputs = {"attention_mask": mask}
    found = sft_trainer.SFTTrainer.compute_loss(trainer, lambda **_: outputs, inputs, num_items_in_batch=mask.sum())
    return found.detach(), torch.autograd.grad(found, logprobs)[0]


def sft_row(folder: str, template: str, messages: list[dict[str, Any]]) -> tuple[list[int], list[int], str]:
    """Return the tokens of a conversation, which of them SFTTrainer trains with assistant_only_loss, and the model's
    own template. `folder`: of the tokenizer. `template`: name of a template of TRL, whose form for training is used."""
    from transformers import AutoTokenizer

    texts = Path(chat_template_utils.__file__).with_name("chat_templates")
    own, for_training = ((texts / f"{name}.jinja").read_text() for name in (template, f"{template}_training"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = sft_trainer._tokenize(
        tokenizer, messages, return_assistant_tokens_mask=True, chat_template=for_training, tools=None
    )
    return found["input_ids"], found["assistant_masks"], own
