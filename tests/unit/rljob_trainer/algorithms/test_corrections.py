"""The proximal policy without a forward pass, and importance weights."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.algorithms.corrections import correct, importance_weights, loglinear_proximal, proximal_shares
from tests.support.algorithms import algorithm_spec


def algorithm(**fields):
    return algorithm_spec(**fields).algorithm


def shares(versions, proximal, current, end):
    return proximal_shares(np.array(versions, np.int32), proximal, current, end).tolist()


def test_proximal_policy_of_older_weights_is_one_step_behind_the_end_of_the_step():
    assert shares([0, 2, 4, 5], 4, 5, 5) == pytest.approx([4 / 5, 2 / 3, 0, 1])
    assert shares([5, 6], 7, 7, 8) == pytest.approx([2 / 3, 1 / 2]), "in the first update, too"


def test_clipping_does_not_see_older_weights_if_the_current_policy_is_the_end():
    assert shares([5, 6], 7, 7, 7) == [1, 1]


def test_first_mini_batch_of_a_step_has_the_current_policy_as_the_proximal_one():
    assert shares([7, 7], 7, 7, 8) == [1, 1]


def test_later_mini_batches_have_the_rollouts_policy_as_the_proximal_one():
    assert shares([7, 7], 7, 7.25, 8) == [0, 0]


@given(st.integers(0, 9), st.integers(0, 9), st.floats(0, 0.99), st.booleans())
def test_share_is_between_the_rollout_and_the_current_policy(version, proximal, progress, is_clipped):
    current = proximal + progress
    [share] = shares([version], proximal, current, proximal + 1 if is_clipped else current)
    assert 0 <= share <= 1


def test_proximal_log_probs_are_exact_at_both_ends_and_carry_no_gradient():
    logprobs, rollout = torch.tensor([-1.3, -1.3, -1.3], requires_grad=True), torch.tensor([-0.7, -0.7, -0.7])
    found = loglinear_proximal(logprobs, rollout, torch.tensor([0.0, 0.5, 1.0]))
    assert found[0] == rollout[0]
    assert found[2] == logprobs[2]
    assert found[1].item() == pytest.approx(-1.0)
    assert not found.requires_grad


def test_importance_weights_carry_no_gradient_and_stay_finite():
    proximal = torch.tensor([-1.0, -1.0, -900.0], requires_grad=True)
    weights = importance_weights(proximal, torch.tensor([-3.0, -900.0, -1.0]))
    assert weights[0].item() == pytest.approx(math.e**2)
    assert weights.isfinite().all()
    assert not weights.requires_grad


@pytest.mark.parametrize(
    ("settings", "expected", "changed"),
    [
        ({}, [0.4, 1.0, 2.0], [False, False, True]),
        ({"correction": {"cap": 5}}, [0.4, 1.0, 3.0], [False, False, False]),
        ({"importanceCap": 0.5}, [0.4, 0.5, 0.5], [False, True, True]),
        ({"correction": {"type": "mask"}}, [0.0, 1.0, 0.0], [True, False, True]),
        ({"correction": {"type": "mask", "cap": 3, "floor": 0.4}}, [0.4, 1.0, 3.0], [False, False, False]),
        ({"correction": {"type": "none"}}, [1.0, 1.0, 1.0], [False, False, False]),
    ],
)
def test_weights_are_truncated_masked_or_ignored(settings, expected, changed):
    found, is_changed = correct(torch.tensor([0.4, 1.0, 3.0], dtype=torch.float64), algorithm(**settings))
    assert found.tolist() == pytest.approx(expected)
    assert is_changed.tolist() == changed
