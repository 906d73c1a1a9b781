"""Each term of the loss against numbers worked out by hand or by plain Python."""

import math

import pytest
import torch

from rljob_api.manifest.algorithm import Algorithm
from rljob_trainer.algorithms.losses import (
    SUMS,
    TokenBatch,
    clipped_objective,
    grpo_loss,
    importance_weights,
    kl_estimate,
)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "is_clipped"),
    [
        (1.5, 2.0, -2.0 * 1.28, True),  # good, and already much likelier
        (1.2, 2.0, -2.0 * 1.2, False),
        (0.5, 2.0, -2.0 * 0.5, False),  # good, and less likely: the gradient must stay
        (0.5, -2.0, 2.0 * 0.8, True),  # bad, and already much less likely
        (1.5, -2.0, 2.0 * 1.5, False),
    ],
)
def test_clip_removes_the_gradient_only_after_a_large_enough_update(ratio, advantage, loss, is_clipped):
    ratios = tensor(ratio).requires_grad_()
    objective, clipped = clipped_objective(ratios, tensor(advantage), clip_low=0.2, clip_high=0.28)
    objective.sum().backward()
    assert objective.item() == pytest.approx(loss)
    assert clipped.item() is is_clipped
    assert ratios.grad.item() == pytest.approx(0 if is_clipped else -advantage)


def test_kl_estimators_are_schulmans():
    logprob, reference = -1.3, -0.9
    log_ratio = reference - logprob
    expected = {"k1": -log_ratio, "k2": log_ratio**2 / 2, "k3": math.exp(log_ratio) - 1 - log_ratio}
    for name, value in expected.items():
        assert kl_estimate(tensor(logprob), tensor(reference), name).item() == pytest.approx(value), name


def test_importance_weights_are_truncated_above_and_carry_no_gradient():
    old = tensor(-1.0, -1.0).requires_grad_()
    weights = importance_weights(old, tensor(-3.0, -0.5), cap=2.0)
    assert weights.tolist() == pytest.approx([2.0, math.exp(-0.5)])
    assert not weights.requires_grad
    assert importance_weights(old, tensor(-3.0, -0.5), cap=None).tolist() == [1.0, 1.0]


def test_all_terms_together_equal_a_plain_python_computation():
    algorithm = Algorithm.model_validate(
        {"clip_high": 0.28, "importance_cap": 1.5, "entropy_coefficient": 0.01, "kl": {"coefficient": 0.1}}
    )
    logprobs, old, rollout, reference = [-1.0, -2.0, -0.5], [-1.4, -1.9, -0.4], [-1.5, -1.8, -0.9], [-1.1, -2.2, -0.4]
    advantages, entropy, weights = [1.0, -0.5, 0.7], [2.0, 1.0, 3.0], [0.25, 0.75, 0.0]
    terms = grpo_loss(
        tensor(*logprobs),
        tensor(*entropy),
        tensor(*reference),
        TokenBatch(tensor(*advantages), tensor(*rollout), tensor(*old), tensor(*weights)),
        algorithm,
    )
    policy_loss = expected = 0.0
    for lp, o, r, ref, a, h, w in zip(logprobs, old, rollout, reference, advantages, entropy, weights, strict=True):
        ratio = math.exp(lp - o)
        surrogate = min(ratio * a, max(0.8, min(1.28, ratio)) * a)
        token = -w * min(math.exp(o - r), 1.5) * surrogate
        policy_loss += token
        expected += token + w * (0.1 * (math.exp(ref - lp) - 1 - (ref - lp)) - 0.01 * h)
    assert terms.loss.item() == pytest.approx(expected)
    sums = dict(zip(SUMS, terms.sums.tolist(), strict=True))
    assert sums["policy_loss"] == pytest.approx(policy_loss)
    assert sums["entropy"] == 3.0, "padding (weight 0) must not be counted"
    assert sums["clipped"] == 1.0
    assert sums["logprob_difference"] == pytest.approx(0.5 + 0.2)


def test_gradient_without_old_logprobs_is_that_of_reinforce():
    logprobs = tensor(-1.0, -2.0).requires_grad_()
    batch = TokenBatch(tensor(1.0, -3.0), tensor(-1.0, -2.0), None, tensor(0.5, 0.5))
    grpo_loss(logprobs, tensor(0.0, 0.0), None, batch, Algorithm()).loss.backward()
    assert logprobs.grad.tolist() == pytest.approx([-0.5, 1.5])
