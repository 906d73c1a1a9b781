"""Each loss and its gradient, against what Tinker's documentation writes, computed token by token."""

from __future__ import annotations

import math

import pytest
import torch

from rljob_trainer.tinker.losses import INPUTS, SETTINGS, compute_loss

LOGPROBS = [-0.2, -1.5, -0.9, -3.0, -0.05, -2.0]
SAMPLED = [-0.3, -1.0, -0.9, -4.5, -0.9, -2.1]
ADVANTAGES = [1.0, -2.0, 0.5, 1.5, -0.7, 0.0]
WEIGHTS = [1.0, 0.0, 0.5, -1.0, 2.0, 1.0]
GIVEN = {"weights": WEIGHTS, "logprobs": SAMPLED, "advantages": ADVANTAGES}


def expect(name: str, low: float, high: float, beta: float) -> tuple[float, list[float]]:
    """The loss, and its derivative by each log-prob."""
    loss, gradient = 0.0, []
    for logprob, sampled, advantage, weight in zip(LOGPROBS, SAMPLED, ADVANTAGES, WEIGHTS, strict=True):
        ratio = math.exp(logprob - sampled)
        clipped = min(max(ratio, low), high)
        if name == "cross_entropy":
            value, slope = -weight * logprob, -weight
        elif name == "importance_sampling":
            value, slope = -ratio * advantage, -ratio * advantage
        elif name == "ppo":
            value = -min(ratio * advantage, clipped * advantage)
            slope = -ratio * advantage if ratio * advantage <= clipped * advantage else 0.0
        elif name == "dro":
            value = -(logprob * advantage - 0.5 * beta * (logprob - sampled) ** 2)
            slope = -advantage + beta * (logprob - sampled)
        else:
            value, slope = -clipped * advantage * logprob, -clipped * advantage
        loss += value
        gradient.append(slope)
    return loss, gradient


@pytest.mark.parametrize("settings", [{}, {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0, "beta": 2.0}])
@pytest.mark.parametrize("name", INPUTS)
def test_loss_and_gradient_are_those_of_the_formula(name, settings):
    settings = {key: value for key, value in settings.items() if key in SETTINGS[name]}
    logprobs = torch.tensor(LOGPROBS, requires_grad=True)
    inputs = {key: torch.tensor(GIVEN[key]) for key in INPUTS[name]}
    loss = compute_loss(name, settings, logprobs, inputs)
    loss.backward()
    low, high = settings.get("clip_low_threshold", 0.8), settings.get("clip_high_threshold", 1.2)
    expected, gradient = expect(name, low, high, settings.get("beta", 0.05))
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert logprobs.grad.tolist() == pytest.approx(gradient, abs=1e-6)


def test_the_values_reach_both_sides_of_both_bounds():
    """Else the test above shows nothing of clipping."""
    ratios = [math.exp(a - b) for a, b in zip(LOGPROBS, SAMPLED, strict=True)]
    for is_positive in (True, False):
        own = [r for r, advantage in zip(ratios, ADVANTAGES, strict=True) if (advantage > 0) is is_positive]
        assert any(r > 1.2 for r in own)
    assert any(r < 0.8 for r in ratios)
