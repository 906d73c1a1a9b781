"""The steps of a replay next to those of the run."""

from __future__ import annotations

from rljob_cli.replay.command import compare_steps, describe_result, to_json
from tests.support.records import step_record


def test_equal_steps_are_equal_to_the_last_bit() -> None:
    records = [step_record(step, loss=0.1, grad_norm=2.0, weight_digest=f"d{step}") for step in (1, 2)]
    steps = compare_steps(records, records)
    assert [step.is_equal for step in steps] == [True, True]
    assert describe_result(steps) == "equal to the run: all numbers, and the weights bit by bit"


def test_smallest_difference_is_found_with_its_first_step() -> None:
    before = [step_record(step, loss=0.5, weight_digest="d") for step in (1, 2, 3)]
    now = [before[0], *(step_record(step, loss=0.5 + 1e-9, weight_digest="e") for step in (2, 3))]
    steps = compare_steps(before, now)
    assert [step.has_equal_weights for step in steps] == [True, False, False]
    assert describe_result(steps) == "differs from the run, first in step 2: by up to 2e-09 of a number"


def test_weights_alone_may_differ() -> None:
    [step] = compare_steps([step_record(1, weight_digest="d")], [step_record(1, weight_digest="e")])
    assert not step.is_equal


def test_run_without_digests_is_compared_by_numbers() -> None:
    steps = compare_steps([step_record(1, loss=0.5)], [step_record(1, loss=0.5, weight_digest="e")])
    assert [step.has_equal_weights for step in steps] == [None]
    assert describe_result(steps) == "equal to the run: all numbers"


def test_step_that_the_run_has_no_record_of_says_so() -> None:
    steps = compare_steps([], [step_record(3, loss=0.5)])
    assert describe_result(steps).startswith("step 3 is not in metrics.jsonl of the run")
    assert to_json(steps[0])["difference"]["loss"] is None


def test_number_that_only_one_has_is_a_difference() -> None:
    steps = compare_steps([step_record(1, kl=None)], [step_record(1, kl=0.1)])
    assert describe_result(steps) == "differs from the run, first in step 1: by up to inf of a number"
