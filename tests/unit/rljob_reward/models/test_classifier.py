"""Logits to scores, and what is asked of vLLM. The whole is tested with a real one (test_judges_real.py)."""

from __future__ import annotations

import math

import pytest

from rljob_reward.models.classifier import activate, find_label_problem


@pytest.mark.parametrize("logit", [-1000.0, -1.5, 0.0, 2.0, 1000.0])
def test_activations_are_exact_and_never_overflow(logit):
    assert activate([logit], 0, "none") == logit
    expected = 0.0 if logit < -700 else 1 / (1 + math.exp(-logit))
    assert activate([logit], 0, "sigmoid") == pytest.approx(expected)
    assert activate([0.0, logit], 1, "softmax") == pytest.approx(expected)


def test_softmax_goes_over_all_labels():
    values = [activate([1.0, 2.0, 3.0], label, "softmax") for label in range(3)]
    assert sum(values) == pytest.approx(1)
    assert values == sorted(values)


def test_a_label_that_is_not_there_or_not_told_is_a_problem():
    assert find_label_problem(None, 1) == ""
    assert "must be set: the model has 3 outputs" in find_label_problem(None, 3)
    assert "at most 2, got 3" in find_label_problem(3, 3)
    assert find_label_problem(2, 3) == ""
