"""The composed loss of an update against numbers worked out by plain Python."""

import itertools
import math

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from rljob_trainer.algorithms.base import LossInputs
from rljob_trainer.algorithms.losses import MAXIMA, SUMS, update_loss
from rljob_trainer.algorithms.registry import ALGORITHMS, build_algorithm
from tests.support.algorithms import algorithm_spec

ALL_TERMS = {
    "correction": {"cap": 1.5},
    "entropyCoefficient": 0.01,
    "loss": {"clipHigh": 0.28},
    "kl": {"coefficient": 0.1},
}


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def inputs_of(logprobs, proximal, rollout, advantages, rows=None):
    rows = rows or [0] * len(logprobs)
    given = [tensor(*values) for values in (logprobs, proximal, rollout, advantages)]
    given[0].requires_grad_()
    return LossInputs(*given, torch.tensor(rows), max(rows) + 1)


def test_all_terms_together_equal_a_plain_python_computation():
    logprobs, old, rollout, reference = [-1.0, -2.0, -0.5], [-1.4, -1.9, -0.4], [-1.5, -2.8, -0.9], [-1.1, -2.2, -0.4]
    advantages, entropy, weights = [1.0, -0.5, 0.7], [2.0, 1.0, 3.0], [0.25, 0.75, 0.0]
    terms = update_loss(
        build_algorithm(algorithm_spec(**ALL_TERMS)),
        inputs_of(logprobs, old, rollout, advantages),
        weights=tensor(*weights),
        entropy=tensor(*entropy),
        reference_logprobs=tensor(*reference),
    )
    policy_loss = expected = kls = 0.0
    for lp, o, r, ref, a, h, w in zip(logprobs, old, rollout, reference, advantages, entropy, weights, strict=True):
        ratio = math.exp(lp - o)
        surrogate = min(ratio * a, max(0.8, min(1.28, ratio)) * a)
        token = -w * min(math.exp(o - r), 1.5) * surrogate
        policy_loss += token
        kl = math.exp(ref - lp) - 1 - (ref - lp)
        kls += kl * (w > 0)
        expected += token + w * (0.1 * kl - 0.01 * h)
    assert terms.loss.item() == pytest.approx(expected)
    found = {name: value.item() for name, value in terms.sums.items()}
    assert tuple(found) == SUMS
    assert found["loss"] == pytest.approx(expected)
    assert found["policy_loss"] == pytest.approx(policy_loss)
    assert found["num_tokens"] == 2, "padding (weight 0) must not be counted"
    assert found["kl"] == pytest.approx(kls)
    assert found["entropy"] == 3.0
    assert found["clipped"] == 1.0
    assert found["corrected"] == 1.0, "the second weight is e^0.9"
    assert found["logprob_difference"] == pytest.approx(0.5 + 0.8)
    differences = (0.5, 0.8)
    assert found["mismatch_kl"] == pytest.approx(sum(math.exp(d) - 1 - d for d in differences))
    assert found["importance"] == pytest.approx(math.exp(0.1) + math.exp(0.9)), "before truncation"
    assert found["squared_importance"] == pytest.approx(math.exp(0.2) + math.exp(1.8))
    assert {name: value.item() for name, value in terms.maxima.items()} == {MAXIMA[0]: pytest.approx(0.8)}


def test_gradient_with_current_weights_is_that_of_reinforce():
    inputs = inputs_of([-1.0, -2.0], [-1.0, -2.0], [-1.0, -2.0], [1.0, -3.0])
    update_loss(build_algorithm(algorithm_spec()), inputs, weights=tensor(0.5, 0.5)).loss.backward()
    assert inputs.logprobs.grad.tolist() == pytest.approx([-0.5, 1.5])


def test_k1_is_reported_but_is_not_in_the_loss():
    algorithm = build_algorithm(algorithm_spec(kl={"coefficient": 0.5, "estimator": "k1"}))
    inputs = inputs_of([-1.0], [-1.0], [-1.0], [0.0])
    terms = update_loss(algorithm, inputs, weights=tensor(1.0), reference_logprobs=tensor(-3.0))
    assert terms.sums["kl"].item() == pytest.approx(2.0)
    assert terms.loss.item() == 0.0, "its gradient would be that of log policy, whose mean is zero"
    assert algorithm.needs.reference, "it is in the reward, so it is needed before advantages"


@pytest.mark.parametrize("type_", ALGORITHMS)
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_loss_and_gradient_are_finite_for_extreme_log_probs(type_, estimator):
    algorithm = build_algorithm(algorithm_spec(type=type_, kl={"coefficient": 0.1, "estimator": estimator}))
    cases = list(itertools.product(*[[-1e-6, -80.0, -2000.0]] * 4, [1.0, -1.0]))
    logprobs, proximal, rollout, reference, advantages = map(list, zip(*cases, strict=True))
    given = [torch.tensor(values, dtype=torch.float32) for values in (logprobs, proximal, rollout, advantages)]
    given[0].requires_grad_()
    inputs = LossInputs(*given, torch.arange(len(cases)) // 2, (len(cases) + 1) // 2)
    terms = update_loss(
        algorithm,
        inputs,
        weights=torch.ones(len(cases)),
        entropy=torch.zeros(len(cases)),
        reference_logprobs=torch.tensor(reference, dtype=torch.float32),
    )
    terms.loss.backward()
    assert inputs.logprobs.grad.isfinite().all()
    assert all(value.isfinite() for value in (terms.loss, *terms.sums.values(), *terms.maxima.values()))


def test_rejected_tokens_add_nothing_and_are_counted():
    rejection = {"level": "sequence", "cap": 2.0}
    rows = [0, 0, 1]
    given = [-1.0, -2.0, -0.5], [-1.0, -2.0, -0.5], [-1.5, -2.5, -0.6], [1.0, 1.0, 1.0]
    inputs = inputs_of(*given, rows)
    terms = update_loss(
        build_algorithm(algorithm_spec(correction={"rejection": rejection})), inputs, weights=tensor(1, 1, 1)
    )
    terms.loss.backward()
    assert inputs.logprobs.grad.tolist() == pytest.approx([0, 0, -math.exp(0.1)]), "row 0: e^(0.5 + 0.5) is above 2"
    found = {name: value.item() for name, value in terms.sums.items()}
    assert (found["num_tokens"], found["rejected"], found["corrected"]) == (3, 2, 0)


@pytest.mark.parametrize(
    "correction", [{"level": "sequence"}, {"type": "none"}, {"type": "mask", "level": "geometric"}]
)
def test_effective_sample_size_does_not_depend_on_the_correction(correction):
    """A sequence's weight spreads with its length: the driver would warn of every job with long answers."""
    given = [-1.0, -2.0], [-1.0, -2.0], [-1.2, -2.2], [1.0, 1.0]
    terms = update_loss(build_algorithm(algorithm_spec(correction=correction)), inputs_of(*given), weights=tensor(1, 1))
    assert terms.sums["importance"].item() == pytest.approx(2 * math.exp(0.2))
    assert terms.sums["squared_importance"].item() == pytest.approx(2 * math.exp(0.4))


def test_micro_batch_of_padding_alone_is_zero_everywhere():
    inputs = inputs_of([-1.0], [-1.0], [-1.0], [0.0])
    terms = update_loss(build_algorithm(algorithm_spec()), inputs, weights=tensor(0.0))
    terms.loss.backward()
    assert inputs.logprobs.grad.tolist() == [0.0]
    assert not any(value.item() for value in (*terms.sums.values(), *terms.maxima.values()))


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_the_host_waits_for_no_value(kind):
    """Fake tensors have none: an operation whose result, or whose result's shape, depends on values raises."""
    rejection = {"level": "geometric", "floor": 0.5, "cap": 2.0}
    correction = {"type": "mask", "level": "sequence", "floor": 0.5, "cap": 1.5, "rejection": rejection}
    kl = {"coefficient": 0.1, "estimator": "k3"}
    algorithm = build_algorithm(algorithm_spec(type=kind, correction=correction, kl=kl, entropyCoefficient=0.01))
    with FakeTensorMode():
        values = torch.randn(5, 8)
        logprobs, entropy = torch.randn(8, requires_grad=True), torch.randn(8, requires_grad=True)
        inputs = LossInputs(logprobs, values[0], values[1], values[2], torch.zeros(8, dtype=torch.int64), 2)
        terms = update_loss(algorithm, inputs, weights=values[3], entropy=entropy, reference_logprobs=values[4])
        terms.loss.backward()
        with pytest.raises(DynamicOutputShapeException):
            values[0][values[1] > 0]
        assert logprobs.grad is not None
