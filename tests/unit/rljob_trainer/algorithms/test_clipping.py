"""Clipped ratios and PPO's objective."""

import math

import pytest
import torch

from rljob_trainer.algorithms.clipping import (
    MAX_LOG_RATIO,
    clip,
    clipped_objective,
    exp_clamped,
    mean_by_row,
    sum_by_row,
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
    objective, clipped = clipped_objective(ratios, tensor(advantage), 0.2, 0.28)
    objective.sum().backward()
    assert objective.item() == pytest.approx(loss)
    assert clipped.item() is is_clipped
    assert ratios.grad.item() == pytest.approx(0 if is_clipped else -advantage)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "is_clipped"),
    [
        (4.0, -2.0, 2.0 * 3.0, True),  # bad, and three times likelier: its gradient must not grow without bound
        (2.9, -2.0, 2.0 * 2.9, False),
        (0.5, -2.0, 2.0 * 0.8, True),  # the lower bound stays
        (4.0, 2.0, -2.0 * 1.28, True),  # of a positive advantage, clipHigh is the bound
        (4.0, 0.0, 0.0, False),
    ],
)
def test_dual_clip_bounds_the_loss_of_negative_advantages_alone(ratio, advantage, loss, is_clipped):
    ratios = tensor(ratio).requires_grad_()
    objective, clipped = clipped_objective(ratios, tensor(advantage), 0.2, 0.28, 3.0)
    objective.sum().backward()
    assert objective.item() == pytest.approx(loss)
    assert clipped.item() is is_clipped
    assert ratios.grad.item() == pytest.approx(0 if is_clipped else -advantage)


def test_bounds_that_are_none_do_not_limit():
    ratios = tensor(1e-3, 1.0, 1e3)
    assert clip(ratios, None, None).tolist() == ratios.tolist()
    assert clip(ratios, None, 4.0).tolist() == [1e-3, 1.0, 5.0]
    assert clip(ratios, 0.2, None).tolist() == [0.8, 1.0, 1e3]


def test_log_ratios_are_clamped_before_exp():
    assert exp_clamped(tensor(-1e4, 0.5, 1e4)).tolist() == pytest.approx(
        [math.exp(-MAX_LOG_RATIO), math.exp(0.5), math.exp(MAX_LOG_RATIO)]
    )


def test_rows_without_tokens_count_as_zero():
    assert mean_by_row(tensor(1, 3, 8), torch.tensor([0, 0, 2]), 3).tolist() == [2, 0, 8]
    assert sum_by_row(tensor(1, 3, 8), torch.tensor([0, 0, 2]), 3).tolist() == [4, 0, 8]
