"""PPO's advantages, its policy loss and its value loss, against plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rljob_trainer.algorithms import gae
from rljob_trainer.algorithms.base import EpisodeRewards, LossInputs
from rljob_trainer.algorithms.ppo import Ppo, value_loss
from rljob_trainer.algorithms.registry import build_algorithm
from tests.support.algorithms import algorithm_spec


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors are tiny: threads would only wait for each other on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def build_ppo(**algorithm: Any) -> Ppo:
    code = build_algorithm(algorithm_spec(type="ppo", **algorithm))
    assert isinstance(code, Ppo)
    return code


def build_group(seed: int = 0) -> list[EpisodeRewards | None]:
    draw = np.random.default_rng(seed)

    def episode(length: int) -> EpisodeRewards:
        turns = np.sort(draw.integers(0, 3, length)).astype(np.int32)
        values, kl = draw.normal(size=length), draw.normal(size=length)
        return EpisodeRewards(draw.normal(), draw.normal(size=3).tolist(), turns, reference_kl=kl, values=values)

    return [episode(4), None, episode(7), episode(1)]


def test_needs_a_critic_and_the_whole_step_unless_advantages_stay_as_they_are():
    assert build_ppo().needs.values
    assert build_ppo().needs.whole_step
    assert not build_ppo(advantages={"normalization": "none"}).needs.whole_step
    assert not build_ppo(kl={"coefficient": 0.1, "estimator": "k3"}).needs.reference
    assert build_ppo(kl={"coefficient": 0.1, "estimator": "k1"}).needs.reference


def test_whitening_shifts_and_scales_all_tokens_of_the_step_and_leaves_the_targets():
    groups = [build_group(0), build_group(1)]
    plain = build_ppo(advantages={"normalization": "none"}).advantages(groups)
    white = build_ppo().advantages(groups)
    before = np.concatenate([e.advantages for group in plain for e in group if e])
    after = np.concatenate([e.advantages for group in white for e in group if e])
    assert after == pytest.approx((before - before.mean()) / before.std(ddof=1))
    assert white[0][1] is None
    for ours, theirs in zip(white[1], plain[1], strict=True):
        assert ours is theirs is None or np.array_equal(ours.returns, theirs.returns)


@pytest.mark.parametrize("level", ["token", "turn"])
def test_kl_of_estimator_k1_is_a_penalty_of_each_token(level):
    settings = {"advantages": {"normalization": "none"}, "gae": {"level": level, "discount": 0.9, "lambda": 0.8}}
    (ours,) = build_ppo(kl={"coefficient": 0.1, "estimator": "k1"}, **settings).advantages([build_group()])
    (without,) = build_ppo(kl={"coefficient": 0.1, "estimator": "k3"}, **settings).advantages([build_group()])
    estimate = gae.over_turns if level == "turn" else gae.over_tokens
    for episode, penalized, plain in zip(build_group(), ours, without, strict=True):
        if episode is not None:
            expected = estimate(episode, 0.1 * episode.reference_kl, discount=0.9, decay=0.8)
            assert penalized.advantages == pytest.approx(expected.advantages)
            assert penalized.returns == pytest.approx(expected.returns)
            expected = estimate(episode, np.zeros(len(episode.turn_of_token)), discount=0.9, decay=0.8)
            assert plain.returns == pytest.approx(expected.returns)


def test_policy_loss_and_gradient_equal_plain_torch():
    draw = torch.Generator().manual_seed(0)
    logprobs, proximal, advantages = torch.randn(3, 50, generator=draw).mul(0.4)
    inputs = LossInputs(
        logprobs.requires_grad_(), proximal, proximal, advantages, torch.zeros(50, dtype=torch.int64), 1
    )
    ours = build_ppo(loss={"clipLow": 0.1, "clipHigh": 0.3}).loss(inputs)
    (gradient,) = torch.autograd.grad(ours.per_token.sum(), logprobs)
    plain = logprobs.detach().clone().requires_grad_()
    ratio = torch.exp(plain - proximal)
    expected = -torch.min(ratio * advantages, torch.clip(ratio, 0.9, 1.3) * advantages)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), plain)
    assert torch.allclose(ours.per_token, expected, atol=1e-6)
    assert torch.allclose(gradient, expected_gradient, atol=1e-6)
    assert torch.equal(ours.clipped, gradient == 0)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss_and_gradient_equal_plain_torch(clip):
    draw = torch.Generator().manual_seed(0)
    values, before, returns = torch.randn(3, 50, generator=draw)
    loss, clipped = value_loss(values.requires_grad_(), before, returns, clip)
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    plain = values.detach().clone().requires_grad_()
    errors = [0.5 * (plain - returns) ** 2]
    if clip:
        errors.append(0.5 * (torch.clip(plain, before - clip, before + clip) - returns) ** 2)
    expected = torch.stack(errors).max(dim=0).values
    (expected_gradient,) = torch.autograd.grad(expected.sum(), plain)
    assert torch.allclose(loss, expected, atol=1e-6)
    assert torch.allclose(gradient, expected_gradient, atol=1e-6)
    assert torch.equal(clipped, gradient == 0)
    assert clipped.any() == (clip is not None), "the case must be met"


@pytest.mark.parametrize("level", ["token", "turn"])
def test_policy_and_critic_learn_a_task_of_two_turns(level):
    """Action 2 is rewarded in the first turn, action 1 in the second. The values of both states are known."""
    draw = torch.Generator().manual_seed(0)
    policy, critic = torch.zeros(2, 3, requires_grad=True), torch.zeros(2, requires_grad=True)
    ppo, turns = build_ppo(gae={"level": level, "lambda": 0.9}), np.array([0, 1], np.int32)
    mean_rewards = []
    for _ in range(50):
        with torch.no_grad():
            probabilities, values = policy.softmax(1), critic.detach().clone()
        actions = torch.multinomial(probabilities, 16, replacement=True, generator=draw).T  # [episodes, turns]
        rewards = (actions == torch.tensor([2, 1])).double().numpy()
        mean_rewards.append(rewards.sum(1).mean())
        before = values.double().numpy()
        (found,) = ppo.advantages([[EpisodeRewards(0.0, of_turns, turns, values=before) for of_turns in rewards]])
        advantages = torch.tensor(np.concatenate([e.advantages for e in found if e]), dtype=torch.float32)
        returns = torch.tensor(np.stack([e.returns for e in found if e]), dtype=torch.float32)
        logprobs = policy.log_softmax(1).expand(16, 2, 3).gather(2, actions[:, :, None]).flatten()
        inputs = LossInputs(
            logprobs, logprobs.detach(), logprobs.detach(), advantages, torch.zeros(32, dtype=torch.int64), 1
        )
        errors, _ = value_loss(critic.expand(16, 2), values.expand(16, 2), returns, 0.5)
        loss = ppo.loss(inputs).per_token.mean() + errors.mean()
        policy_gradient, critic_gradient = torch.autograd.grad(loss, [policy, critic])
        with torch.no_grad():
            policy -= 2.0 * policy_gradient
            critic -= 0.4 * critic_gradient
    assert np.mean(mean_rewards[-5:]) > 1.8 > 1.2 > np.mean(mean_rewards[:3])
    assert critic.tolist() == pytest.approx([2, 1], abs=0.2)
