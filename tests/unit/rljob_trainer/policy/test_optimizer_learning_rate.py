"""Learning rates by update."""

import pytest

from rljob_api.manifest.algorithm import Optimizer
from rljob_trainer.policy.optimizer import learning_rate


def rates(total: int, **settings: object) -> list[float]:
    optimizer = Optimizer.model_validate({"learning_rate": 1.0, **settings})
    return [learning_rate(optimizer, update, total) for update in range(total + 1)]


def test_constant_rate_is_the_peak_from_the_first_update():
    assert rates(3) == [1.0] * 4


def test_warm_up_rises_from_the_first_update_to_the_peak():
    assert rates(5, warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


def test_linear_decay_ends_at_the_minimum_ratio_and_stays_there():
    assert rates(4, schedule="linear", min_ratio=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert learning_rate(Optimizer(learning_rate=1.0, schedule="linear", min_ratio=0.2), 9, 4) == pytest.approx(0.2)


def test_cosine_decay_follows_the_warm_up():
    cosine = rates(6, schedule="cosine", warmup_steps=2, min_ratio=0.1)
    assert cosine == pytest.approx([0.5, 1.0, 1.0, 0.8681980515, 0.55, 0.2318019485, 0.1])


def test_warm_up_longer_than_the_job_does_not_divide_by_zero():
    assert rates(2, schedule="linear", warmup_steps=5) == pytest.approx([0.2, 0.4, 0.6])


def test_extended_job_uses_the_rates_of_the_longer_job():
    linear = Optimizer(learning_rate=1.0, schedule="linear")
    assert learning_rate(linear, 50, 100) == pytest.approx(0.5)
    assert learning_rate(linear, 50, 200) == pytest.approx(0.75)
