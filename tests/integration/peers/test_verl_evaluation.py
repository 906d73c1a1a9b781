"""The figures of an evaluation against verl's own functions of validation, on the same answers.

verl draws answers with replacement for best@k and maj@k, so these are other numbers; pass@k is compared with counts
over all draws in tests/unit. Where nothing is drawn, the numbers are equal.
"""

from __future__ import annotations

import itertools
import random

import pytest

from rljob_trainer.driver.estimates import Answer, estimate_mean, majority, pass_at
from tests.integration.peers.environment import Peers

pytestmark = pytest.mark.slow


def test_mean_is_verls_and_failed_episodes_are_zeros_in_both(peers: Peers) -> None:
    draw = random.Random(0)
    prompts = [[float(draw.random() < share) for _ in range(8)] for share in (0.1, 0.5, 0.9, 0.3)]
    found = estimate_mean([[Answer(value) for value in values] for values in prompts])
    theirs = peers.call("verl", "validation", prompts=prompts, preds=[], num_expected=8)
    assert found is not None
    assert found.value == pytest.approx(theirs["mean@8"], abs=1e-12)
    failed = estimate_mean([[Answer(value) for value in [*values[:6], 0.0, 0.0]] for values in prompts])
    shorter = peers.call("verl", "validation", prompts=[values[:6] for values in prompts], preds=[], num_expected=8)
    assert failed is not None
    assert failed.value == pytest.approx(shorter["mean@8"], abs=1e-12)


def test_vote_is_verls_and_between_equal_ones_its_mean_over_all_orders(peers: Peers) -> None:
    draw = random.Random(1)
    for _ in range(20):
        answers = [(draw.choice("abc"), draw.choice([0.0, 0.5, 1.0])) for _ in range(5)]
        theirs = peers.call("verl", "votes", prompts=[list(order) for order in itertools.permutations(answers)])
        ours = majority([Answer(value, text) for text, value in answers])
        assert ours == pytest.approx(sum(theirs) / len(theirs), abs=1e-12)


def test_verls_best_of_k_is_below_pass_at_k(peers: Peers) -> None:
    """It draws answers with replacement, so the second of two draws may be the first one again."""
    prompts = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [0.0] * 4]
    theirs = peers.call("verl", "validation", prompts=prompts, preds=[], num_expected=4)
    for k in (2, 4):
        ours = sum(pass_at(4, int(sum(values)), k) for values in prompts) / 3
        with_replacement = sum(1 - (1 - sum(values) / 4) ** k for values in prompts) / 3
        assert theirs[f"best@{k}/mean"] == pytest.approx(with_replacement, abs=0.03)
        assert theirs[f"best@{k}/mean"] < ours - 0.02
