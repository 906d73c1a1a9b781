"""Losses and gradients of the algorithms that TRL has, against TRL's own code.

TRL is in the dependency group `bench` (make bench-trainer installs it); without it, these tests are skipped.
"""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from rljob_trainer.algorithms.base import LossInputs
from rljob_trainer.algorithms.losses import update_loss
from rljob_trainer.algorithms.registry import build_algorithm
from tests.support.algorithms import algorithm_spec

EPISODES, LENGTH, VOCABULARY = 6, 7, 11
GRPO_TRAINER = pytest.importorskip(
    "trl.trainer.grpo_trainer", reason="TRL is not installed: uv sync --group bench --inexact"
).GRPOTrainer

# (our type, our level, TRL's loss_type and importance_sampling_level, bounds of TRL)
CASES = [
    ("grpo", "sequence", "grpo", "token", (0.2, 0.2)),
    ("grpo", "token", "dapo", "token", (0.2, 0.2)),
    ("drGrpo", "constant", "dr_grpo", "token", (0.2, 0.2)),
    ("dapo", "token", "dapo", "token", (0.2, 0.28)),
    ("gspo", "sequence", "grpo", "sequence", (3e-4, 4e-4)),
    ("cispo", "token", "cispo", "token", (0.2, 5.0)),
]


@pytest.fixture
def batch():
    """Episodes whose rollout, proximal and reference policies differ from the current one.  [episodes, tokens]"""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(EPISODES, LENGTH, VOCABULARY, generator=generator)
    chosen = torch.randint(VOCABULARY, (EPISODES, LENGTH, 1), generator=generator)

    def near(scale):
        return pick(logits + scale * torch.randn(logits.shape, generator=generator), chosen)

    lengths = torch.tensor([7, 3, 1, 5, 6, 2])
    return SimpleNamespace(
        logits=logits.requires_grad_(),
        chosen=chosen,
        mask=torch.arange(LENGTH) < lengths[:, None],
        proximal=near(0.4).detach(),
        rollout=near(0.4).detach(),
        reference=near(0.4).detach(),
        advantages=torch.tensor([1.0, -0.5, 0.7, -1.2, 0.3, -0.3]),
    )


def pick(logits, chosen):
    return logits.log_softmax(-1).gather(-1, chosen)[..., 0]


def trls_loss(batch, loss_type, level, bounds, beta):
    """Call GRPOTrainer._compute_loss with the least that it reads."""
    totals = SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1)
    logprobs = pick(batch.logits, batch.chosen)
    trainer = SimpleNamespace(
        loss_type=loss_type, importance_sampling_level=level, epsilon_low=bounds[0], epsilon_high=bounds[1], beta=beta,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=True, aux_loss_enabled=False,
        vllm_importance_sampling_correction=True, current_gradient_accumulation_steps=1,
        max_completion_length=LENGTH, accelerator=totals, _entropy_bonus_enabled=False,
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
    )  # fmt: skip
    inputs = {
        "prompt_ids": torch.zeros(EPISODES, 1, dtype=torch.long),
        "prompt_mask": torch.ones(EPISODES, 1, dtype=torch.long),
        "completion_ids": batch.chosen[..., 0],
        "completion_mask": batch.mask.long(),
        "advantages": batch.advantages,
        "old_per_token_logps": batch.proximal,
        "ref_per_token_logps": batch.reference,
        "importance_sampling_ratio": torch.exp(batch.proximal - batch.rollout).clamp(max=2.0),
        "num_items_in_batch": batch.mask.sum(),
    }
    return GRPO_TRAINER._compute_loss(trainer, None, inputs)


def our_loss(batch, spec):
    mask, counts = batch.mask, batch.mask.sum(1)
    rows = torch.arange(EPISODES)[:, None].expand(mask.shape)[mask]
    inputs = LossInputs(
        pick(batch.logits, batch.chosen)[mask],
        batch.proximal[mask],
        batch.rollout[mask],
        batch.advantages[rows],
        rows,
        EPISODES,
    )
    algorithm = build_algorithm(spec)
    level = algorithm.settings.level
    weights = {"token": torch.ones(EPISODES), "sequence": 1 / counts, "constant": torch.full((EPISODES,), 1 / LENGTH)}
    terms = update_loss(algorithm, inputs, weights=weights[level][rows], reference_logprobs=batch.reference[mask])
    return terms.loss / (int(counts.sum()) if level == "token" else EPISODES)


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize(("type_", "level", "loss_type", "trl_level", "bounds"), CASES)
def test_loss_and_gradient_equal_trls(batch, type_, level, loss_type, trl_level, bounds, beta):
    """gspo is compared without correction: TRL weighs the ratio of the whole sequence by each token's weight, and we
    weigh each token's gradient."""
    spec = algorithm_spec(type=type_, loss={"level": level}, kl={"coefficient": beta}, max_tokens=LENGTH)
    if type_ == "gspo":
        spec = algorithm_spec(type=type_, kl={"coefficient": beta}, correction={"type": "none"}, max_tokens=LENGTH)
        batch.rollout = batch.proximal
    expected = trls_loss(batch, loss_type, trl_level, bounds, beta)
    (expected_gradient,) = torch.autograd.grad(expected, batch.logits)
    found = our_loss(batch, spec)
    (gradient,) = torch.autograd.grad(found, batch.logits)
    assert found.item() == pytest.approx(expected.item(), abs=1e-5)
    assert torch.allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-6)
    assert gradient.abs().max() > 1e-3
