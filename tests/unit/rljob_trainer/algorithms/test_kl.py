"""KL estimators, and where each of them belongs."""

import math

import numpy as np
import pytest
import torch

from rljob_trainer.algorithms.kl import kl_estimate, kl_returns
from rljob_trainer.algorithms.registry import build_algorithm
from tests.support.algorithms import algorithm_spec, rewards_of

POLICY = torch.tensor([0.1, 0.4, -0.3, 0.9], dtype=torch.float64)
REFERENCE = torch.tensor([0.6, -0.2, 0.5, 0.0], dtype=torch.float64).log_softmax(-1)


def true_gradient():
    """The gradient of KL(policy || reference), with respect to the logits of a softmax over 4 answers."""
    logits = POLICY.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    (logprobs.exp() * (logprobs - REFERENCE)).sum().backward()
    return logits.grad


def expected_gradient(loss_of_samples):
    """Return the mean gradient over all answers, each with its probability."""
    logits = POLICY.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    (logprobs.detach().exp() * loss_of_samples(logprobs)).sum().backward()
    return logits.grad


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_estimators_are_schulmans(estimator):
    logprob, reference = -1.3, -0.9
    d = reference - logprob
    expected = {"k1": -d, "k2": d**2 / 2, "k3": math.exp(d) - 1 - d}[estimator]
    found = kl_estimate(torch.tensor([logprob]), torch.tensor([reference]), estimator)
    assert found.item() == pytest.approx(expected, abs=1e-6)


def test_k1_as_a_loss_has_no_gradient_on_average():
    found = expected_gradient(lambda logprobs: kl_estimate(logprobs, REFERENCE, "k1"))
    assert torch.allclose(found, torch.zeros(4, dtype=torch.float64), atol=1e-12)
    assert true_gradient().abs().max() > 0.1


@pytest.mark.parametrize("type_", ["grpo", "drGrpo", "dapo", "rloo", "gspo", "cispo"])
def test_k1_in_the_reward_has_the_gradient_of_the_kl(type_):
    algorithm = build_algorithm(algorithm_spec(type=type_, kl={"coefficient": 0.5, "estimator": "k1"}))
    k1 = POLICY.log_softmax(-1) - REFERENCE
    # A group with each answer once, and with the same rewards: all that is left is the penalty, less a constant.
    group = [rewards_of(1.0, reference_kl=np.array([float(value)])) for value in k1]
    [found] = algorithm.advantages([group])
    advantages = torch.tensor([float(each.advantages[0]) for each in found], dtype=torch.float64)
    gradient = expected_gradient(lambda logprobs: -advantages * logprobs)
    assert torch.allclose(gradient, 0.5 * true_gradient())


def test_k2_in_the_loss_has_the_gradient_of_the_kl():
    found = expected_gradient(lambda logprobs: kl_estimate(logprobs, REFERENCE, "k2"))
    assert torch.allclose(found, true_gradient())


def test_k3_in_the_loss_has_the_gradient_of_the_reversed_kl():
    found = expected_gradient(lambda logprobs: kl_estimate(logprobs, REFERENCE, "k3"))
    assert torch.allclose(found, POLICY.softmax(-1) - REFERENCE.exp())


def test_penalty_of_a_token_is_that_of_it_and_the_later_ones():
    assert kl_returns(rewards_of(0.0, 3, reference_kl=np.array([1.0, 2.0, 4.0]))).tolist() == [7, 6, 4]
    algorithm = build_algorithm(algorithm_spec(kl={"coefficient": 0.1, "estimator": "k1"}))
    members = [rewards_of(1.0, 2, reference_kl=np.array([1.0, 2.0])), rewards_of(1.0, 1, reference_kl=np.array([4.0]))]
    [[first, second]] = algorithm.advantages([members])
    assert first.advantages.tolist() == pytest.approx([0.1 * (3 - 3), 0.1 * (3 - 2)]), "the mean of 3, 2 and 4 is 3"
    assert second.advantages.tolist() == pytest.approx([0.1 * (3 - 4)])


def test_missing_reference_log_probs_are_an_error():
    with pytest.raises(ValueError, match="needs log-probs of the reference model"):
        kl_returns(rewards_of(0.0))


def test_k3_is_finite_where_the_reference_is_far_likelier():
    logprobs = torch.tensor([-500.0], requires_grad=True)
    value = kl_estimate(logprobs, torch.tensor([-0.1]), "k3")
    value.backward()
    assert value.isfinite().all()
    assert logprobs.grad.item() == 0.0, "it must not push the policy away"
