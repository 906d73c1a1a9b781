"""When the log warns of a drift, of too many answers that are cut off, and of adapters that merging rounds away."""

import pytest

from rljob_trainer.algorithms.registry import build_algorithm
from rljob_trainer.driver.step_warnings import (
    MAX_MISMATCH_KL,
    MAX_SHAPED_SHARE,
    MIN_EFFECTIVE_SAMPLE_SHARE,
    NUM_STEPS,
    judge_merging,
    judge_mismatch,
    judge_overlong,
)
from tests.support.algorithms import algorithm_spec
from tests.support.records import step_record


def records(kls=None, shares=None, staleness=0):
    """Return the records of steps 5, 6, ..."""
    kls = kls or [0.001] * len(shares)
    shares = shares or [0.9] * len(kls)
    return [
        step_record(step, mismatch_kl=kl, effective_sample_share=share, staleness_max=staleness)
        for step, (kl, share) in enumerate(zip(kls, shares, strict=True), 5)
    ]


@pytest.mark.parametrize(
    "history",
    [
        [],
        records(kls=[1.0] * (NUM_STEPS - 1)),
        records(kls=[1.0, 1.0, MAX_MISMATCH_KL]),
        records(kls=[1.0, MAX_MISMATCH_KL, 1.0]),
        records(shares=[0.1, MIN_EFFECTIVE_SAMPLE_SHARE, 0.1]),
        [step_record()] * NUM_STEPS,
        records(kls=[1.0, None, 1.0]),
    ],
)
def test_short_or_unknown_difference_gives_no_warning(history):
    assert judge_mismatch(history) == ""


def test_drift_names_the_numbers_and_the_steps():
    found = judge_mismatch(records(kls=[0.001, 0.02, 0.03, 0.04], shares=[0.9, 0.9, 0.4, 0.9]))
    assert found.startswith("in steps 6 to 8 ")
    assert "the mismatch KL is 0.04 (expected: at most 0.01)" in found
    assert "effective sample share" not in found, "it was low in one step only"


def test_remedy_depends_on_the_cause():
    exact, stale = (judge_mismatch(records(shares=[0.4, 0.3, 0.2], staleness=s)) for s in (0, 2))
    assert "the effective sample share is 0.20 (expected: at least 0.5)" in exact
    assert "trainer.dtype" in exact
    assert "schedule.maxStaleness" not in exact
    assert "schedule.maxStaleness" in stale


def settings(**algorithm):
    return build_algorithm(algorithm_spec(**algorithm)).settings


@pytest.mark.parametrize(
    ("algorithm", "share"),
    [
        ({"type": "dapo"}, MAX_SHAPED_SHARE),
        ({"type": "dapo"}, None),
        ({"type": "dapo", "truncated": {"answers": "mask"}}, 1.0),
        ({"type": "grpo"}, 1.0),
    ],
)
def test_few_cut_answers_or_no_punishment_give_no_warning(algorithm, share):
    assert judge_overlong(step_record(truncated_share=share), settings(**algorithm)) == ""


def test_warning_names_the_numbers_and_the_fields():
    shaped = settings(type="dapo", max_tokens=12, truncated={"penalty": 0.5})
    found = judge_overlong(step_record(3, truncated_share=0.67), shaped)
    assert found.startswith("in step 3 67% of the answers reached rollout.sampling.maxTokens (12), and each lost 0.5 ")
    assert "algorithm.truncated.answers" in found


def test_a_small_share_is_warned_of_with_the_step_and_the_fix():
    text = judge_merging(step_record(12, merged_share=0.055))
    assert "after step 12 the weights that rollouts sample from have 6% of the adapters' update" in text
    assert "trainer.lora.publish: adapter" in text


@pytest.mark.parametrize("share", [None, 0.5, 1.0])
def test_most_of_the_update_or_nothing_merged_is_fine(share):
    assert not judge_merging(step_record(merged_share=share))
