"""The proximal policy without a forward pass, and importance weights."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rljob_trainer.algorithms.base import LossInputs
from rljob_trainer.algorithms.losses import correct, importance_weights, loglinear_proximal
from rljob_trainer.policy.layout import proximal_shares
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


def inputs_of(importance, rows=None, movement=1.0):
    """Return tokens with these ratios prox / mu, and pi / prox = `movement`."""
    rows = torch.zeros(len(importance), dtype=torch.int64) if rows is None else torch.tensor(rows)
    proximal = torch.tensor(importance, dtype=torch.float64).log() - 1
    rollout = torch.full_like(proximal, -1)
    return LossInputs(
        (proximal + math.log(movement)).requires_grad_(), proximal, rollout, rollout, rows, int(rows.max()) + 1
    )


@pytest.mark.parametrize(
    ("settings", "expected", "changed"),
    [
        ({}, [0.4, 1.0, 2.0], [False, False, True]),
        ({"correction": {"cap": 5}}, [0.4, 1.0, 3.0], [False, False, False]),
        ({"correction": {"cap": 1}}, [0.4, 1.0, 1.0], [False, False, True]),
        ({"correction": {"type": "mask"}}, [0.0, 1.0, 0.0], [True, False, True]),
        ({"correction": {"type": "mask", "cap": 3.01, "floor": 0.39}}, [0.4, 1.0, 3.0], [False, False, False]),
        ({"correction": {"type": "none"}}, [1.0, 1.0, 1.0], [False, False, False]),
    ],
)
def test_weights_are_truncated_masked_or_ignored(settings, expected, changed):
    found = correct(inputs_of([0.4, 1.0, 3.0]), algorithm(**settings))
    assert found.weights.tolist() == pytest.approx(expected)
    assert found.changed.tolist() == changed
    assert not found.weights.requires_grad
    assert not found.rejected.any()


ROWS, RATIOS = [0, 1, 0, 0, 1, 2], [2.0, 0.25, 2.0, 0.5, 1.0, 8.0]
"""Row 0: product 2, mean 2^(1/3). Row 1: product 1/4, mean 1/2. Row 2: one token of 8."""


@pytest.mark.parametrize(
    ("correction", "expected", "changed"),
    [
        ({"level": "sequence", "type": "truncate", "cap": 4}, [2, 0.25, 4], [False, False, True]),
        ({"level": "sequence", "type": "mask", "cap": 4, "floor": 0.3}, [2, 0, 0], [False, True, True]),
        ({"level": "sequence", "type": "none"}, [1, 1, 1], [False, False, False]),
        ({"level": "geometric", "type": "truncate", "cap": 1.2}, [1.2, 0.5, 1.2], [True, False, True]),
        ({"level": "geometric", "type": "mask", "cap": 2, "floor": 0.4}, [2 ** (1 / 3), 0.5, 0], [False, False, True]),
    ],
)
def test_all_tokens_of_a_sequence_share_one_weight(correction, expected, changed):
    found = correct(inputs_of(RATIOS, ROWS), algorithm(correction=correction))
    assert found.weights.tolist() == pytest.approx([expected[row] for row in ROWS])
    assert found.changed.tolist() == [changed[row] for row in ROWS]


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_weights_stay_finite_in_long_sequences(level):
    inputs = inputs_of([9.0] * 5000)
    assert correct(inputs, algorithm(correction={"level": level, "cap": 1e12})).weights.isfinite().all()


@pytest.mark.parametrize(
    ("rejection", "expected"),
    [
        ({"level": "token", "cap": 2.5}, [False, True, False, False, False, True]),
        ({"level": "sequence", "cap": 2.5}, [False, True, False, False, True, True]),
        ({"cap": 1.2}, [True, True, True, True, True, True]),
        ({"cap": 1.5}, [False, True, False, False, True, True]),
        ({"cap": 9, "floor": 0}, [False] * 6),
        ({"cap": 9, "floor": 0.9}, [False, True, False, False, True, False]),
    ],
)
def test_rejected_sequences_are_left_out_and_the_others_keep_their_weight(rejection, expected):
    found = correct(inputs_of(RATIOS, ROWS), algorithm(correction={"rejection": rejection, "cap": 4}))
    assert found.rejected.tolist() == expected
    weights = [0 if rejected else min(ratio, 4) for ratio, rejected in zip(RATIOS, expected, strict=True)]
    assert found.weights.tolist() == pytest.approx(weights)
    assert found.changed.tolist() == [False] * 5 + [True], "what the weight's own limits changed"


def test_rejection_sees_the_whole_difference_to_the_rollout():
    """In later updates of a step prox is mu, so their ratio hides what the rollout computed."""
    settings = algorithm(correction={"rejection": {"level": "token", "cap": 2}})
    assert not correct(inputs_of([1.0, 1.0]), settings).rejected.any()
    assert correct(inputs_of([1.0, 1.0], movement=2.5), settings).rejected.all()
