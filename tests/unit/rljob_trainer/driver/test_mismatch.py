"""When the trainer and the rollouts disagree for too long."""

import pytest

from rljob_trainer.driver.mismatch import MAX_MISMATCH_KL, MIN_EFFECTIVE_SAMPLE_SHARE, NUM_STEPS, judge_mismatch
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
