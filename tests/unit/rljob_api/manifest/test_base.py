"""What every type of a manifest shares: rules, and the way to YAML and back."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from pydantic import ValidationError

from rljob_api.manifest.base import DEFER_RULES, Rule, Spec
from rljob_api.manifest.job_sections import Optimizer


class Inner(Spec):
    most: int = 1


class Outer(Spec):
    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(("least", "inner.most"), "must be below inner.most", "lower it", lambda o: o.least < o.inner.most, "x"),
        Rule(("least",), "must be even", "add 1", lambda o: o.least % 2 == 0, "y"),
    )
    least: int = 0
    inner: Inner = Inner()


def test_a_broken_rule_says_the_values_and_the_remedy() -> None:
    with pytest.raises(ValidationError) as caught:
        Outer(least=2)
    assert (
        caught.value.errors()[0]["msg"].removeprefix("Value error, ")
        == "least must be below inner.most, got 2 (inner.most is 1); lower it"
    )


def test_all_broken_rules_of_an_object_are_reported_together() -> None:
    with pytest.raises(ValidationError) as caught:
        Outer(least=3)
    message = caught.value.errors()[0]["msg"]
    assert "must be below" in message
    assert "must be even" in message


def test_rules_wait_for_a_caller_that_checks_them_itself() -> None:
    assert Outer.model_validate({"least": 3}, context=DEFER_RULES).least == 3


def test_a_null_that_means_off_survives_the_way_into_a_manifest() -> None:
    manifest = Optimizer(max_grad_norm=None).to_manifest()
    assert manifest["maxGradNorm"] is None
    assert Optimizer.model_validate(manifest).max_grad_norm is None
    assert "maxGradNorm" in Optimizer().to_manifest()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_number_of_a_manifest_is_infinite(value: Any) -> None:
    with pytest.raises(ValidationError, match="finite"):
        Optimizer(epsilon=value)


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(ValidationError, match="Extra inputs"):
        Optimizer.model_validate({"learningrate": 1})
