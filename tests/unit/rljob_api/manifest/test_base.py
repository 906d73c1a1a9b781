from __future__ import annotations

from typing import Any, ClassVar

import pytest
from pydantic import ValidationError

from rljob_api.manifest.algorithm import Optimizer
from rljob_api.manifest.base import DEFER_RULES, Rule, Spec


class Inner(Spec):
    top: int = 1


class Outer(Spec):
    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("low", "inner.top"),
            "must be below inner.top",
            "lower it",
            lambda o: o.low < o.inner.top,
            "x",
        ),
        Rule(("low",), "must be even", "add 1", lambda o: o.low % 2 == 0, ""),
        Rule(("low",), "must not be -2", "add 2", lambda o: o.low != -2, "", is_ratcheted=True),
    )
    low: int = 0
    inner: Inner = Inner()


def test_violated_rule_reports_values_and_remedy() -> None:
    with pytest.raises(ValidationError) as caught:
        Outer(low=2)
    assert (
        caught.value.errors()[0]["msg"].removeprefix("Value error, ")
        == "low must be below inner.top, got 2 (inner.top is 1); lower it"
    )


def test_all_violated_rules_are_reported_together() -> None:
    with pytest.raises(ValidationError) as caught:
        Outer(low=3)
    message = caught.value.errors()[0]["msg"]
    assert "must be below" in message
    assert "must be even" in message


def test_rules_are_skipped_when_the_caller_defers_them() -> None:
    assert Outer.model_validate({"low": 3}, context=DEFER_RULES).low == 3


def test_stored_object_that_violates_a_later_rule_stays_valid() -> None:
    assert Outer(low=-2).low == -2


def test_manifest_keeps_null_when_the_default_is_a_value() -> None:
    manifest = Optimizer(max_grad_norm=None).to_manifest()
    assert manifest["maxGradNorm"] is None
    assert Optimizer.model_validate(manifest).max_grad_norm is None
    assert "maxGradNorm" in Optimizer().to_manifest()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_must_be_finite(value: Any) -> None:
    with pytest.raises(ValidationError, match="finite"):
        Optimizer(epsilon=value)


def test_unknown_fields_are_rejected() -> None:
    with pytest.raises(ValidationError, match="Extra inputs"):
        Optimizer.model_validate({"learningrate": 1})
