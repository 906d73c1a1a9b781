"""Which step is the best one."""

import pytest

from rljob_api.manifest.evaluation import BestStep
from rljob_trainer.driver.ledger import choose_best, describe_unknown
from tests.support.records import evaluation_record


def choose(*records, before=None, metric="accuracy"):
    return choose_best(before, BestStep(set="math", metric=metric), records)


def math(step, accuracy, **fields):
    return evaluation_record(step, accuracy, set="math", **fields)


def test_highest_accuracy_wins_and_of_equal_steps_the_first():
    best = choose(math(0, 0.1), math(2, 0.5, accuracy_low=0.4, accuracy_high=0.6), math(4, 0.5), math(6, 0.2))
    assert (best.step, best.value, best.low, best.high) == (2, 0.5, 0.4, 0.6)
    assert choose(math(8, 0.5), before=best) == best
    assert choose(math(8, 0.6), before=best).step == 8


def test_other_sets_and_unknown_numbers_decide_nothing():
    assert choose(evaluation_record(2, 0.9), math(4, None)) is None
    assert choose_best(None, None, [math(2, 0.9)]) is None


@pytest.mark.parametrize(("metric", "value"), [("pass@4", 0.7), ("majority", 0.6), ("accuracy", 0.5)])
def test_metric_is_the_one_that_the_job_names(metric, value):
    numbers = {"majority": 0.6, "majority_low": 0.5, "pass_at": {1: 0.5, 4: 0.7}, "pass_at_low": {4: 0.5}}
    best = choose(math(2, 0.5, accuracy_low=0.5, **numbers), metric=metric)
    assert (best.metric, best.value, best.low) == (metric, value, 0.5)


def test_a_number_that_the_set_never_reports_is_told():
    """Without pred there is no majority, and no step would ever be the best."""
    wanted = BestStep(set="math", metric="majority")
    told = describe_unknown(wanted, [evaluation_record(2, 0.9), math(2, 0.5)])
    assert told.startswith("spec.evaluation.best: step 2 has no majority of math")
    assert "return pred" in told
    assert describe_unknown(wanted, [evaluation_record(2, 0.9)]) == "", "math was not evaluated"
    assert describe_unknown(wanted, [math(2, 0.5, majority=0.5)]) == ""
    assert "pred" not in describe_unknown(BestStep(set="math"), [math(2, None)])
    assert describe_unknown(None, [math(2, None)]) == ""


def test_best_by_another_number_does_not_count():
    """A changed job decides by what it names now."""
    before = choose(math(2, 0.9))
    assert choose(before=before, metric="majority") is None
    assert choose(math(4, 0.1, majority=0.1), before=before, metric="majority").step == 4
