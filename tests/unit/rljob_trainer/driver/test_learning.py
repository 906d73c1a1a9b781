"""Which steps teach nothing, and what follows from several in a row."""

from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_api.wire.driver_status import DriverProblem, LearningReason
from rljob_trainer.driver.learning import (
    StepSignal,
    StepsWithoutSignal,
    classify_step,
    describe_failure,
    judge,
)
from tests.support.driver_harness import make_job
from tests.support.records import step_record

INVALID, EQUAL, LEARNS = StepSignal.NO_VALID_SAMPLES, StepSignal.NO_ADVANTAGES, StepSignal.ADVANTAGES
REWARDS = make_job().spec.rewards


def count(signals):
    counts = StepsWithoutSignal()
    for signal in signals:
        counts = counts.after(signal)
    return counts


def judge_all(signals, limit=3):
    return judge(count(signals), len(signals), limit, zero_std_threshold=1e-4)


@pytest.mark.parametrize(
    ("masked", "zero_signal_share", "expected"), [(8, 1.0, INVALID), (0, 1.0, EQUAL), (7, 1.0, EQUAL), (4, 0.5, LEARNS)]
)
def test_step_is_classified_by_its_record(masked, zero_signal_share, expected):
    record = step_record(num_samples=8, num_masked=masked, zero_signal_share=zero_signal_share)
    assert classify_step(record) is expected


def test_step_of_a_warm_start_learns_without_samples():
    assert classify_step(step_record(num_samples=0, num_masked=0, zero_signal_share=None)) is LEARNS


def test_steps_of_a_warm_start_say_nothing_of_advantages():
    verdicts = [judge(StepsWithoutSignal(), step, 3, 1e-4, num_warm=2) for step in (1, 2, 3)]
    assert [verdict.is_learning for verdict in verdicts] == [None, None, True]


def test_invalid_steps_fail_the_job_at_the_limit():
    assert judge_all([LEARNS, INVALID, INVALID]).is_learning is None
    verdict = judge_all([LEARNS, INVALID, INVALID, INVALID])
    assert (verdict.is_learning, verdict.reason) == (False, LearningReason.NO_VALID_SAMPLES)


def test_a_step_with_equal_scores_between_invalid_ones_only_warns():
    verdict = judge_all([INVALID, INVALID, EQUAL, INVALID, INVALID])
    assert (verdict.is_learning, verdict.reason) == (False, LearningReason.NO_ADVANTAGES)


def test_warning_keeps_its_message_until_signal_returns():
    third, fourth = (judge_all([LEARNS, *[EQUAL] * n]) for n in (3, 4))
    assert third == fourth
    assert "since step 2 " in third.message
    assert judge_all([LEARNS, *[EQUAL] * 4, LEARNS]).is_learning is True


@pytest.mark.parametrize(("signal", "num_steps"), [(EQUAL, 3), (EQUAL, 7), (INVALID, 3), (INVALID, 7)])
def test_message_has_the_first_step_without_signal(signal, num_steps):
    verdict = judge_all([LEARNS] * 11 + [signal] * num_steps)
    assert "since step 12 no sample" in verdict.message
    assert (verdict.reason == LearningReason.NO_VALID_SAMPLES) is (signal is INVALID)


def test_failure_has_at_most_three_reasons():
    problems = [DriverProblem(reward="correct", reason="timeout", message=f"m{n}", count=n) for n in range(1, 6)]
    message = describe_failure(StepsWithoutSignal(3, 3), problems, REWARDS)
    assert [n for n in range(1, 6) if f": m{n}" in message] == [3, 4, 5]


def test_limit_of_zero_is_off():
    assert judge_all([INVALID] * 50, limit=0).is_learning is None


@given(st.lists(st.sampled_from(StepSignal), max_size=30), st.integers(0, 6))
def test_verdict_depends_only_on_the_last_steps_in_a_row(signals, limit):
    without = len(list(takewhile(lambda signal: signal is not LEARNS, reversed(signals))))
    invalid = len(list(takewhile(lambda signal: signal is INVALID, reversed(signals))))
    verdict = judge_all(signals, limit)
    assert count(signals) == (invalid, without)
    assert (verdict.is_learning is True) == (bool(signals) and without == 0)
    assert (verdict.is_learning is False) == (0 < limit <= without)
    assert (verdict.reason == LearningReason.NO_VALID_SAMPLES) == (0 < limit <= invalid)


def test_failure_begins_with_the_field_and_has_the_most_frequent_reasons():
    rewards = [{"name": n, "function": {"inline": "x"}} for n in ("style", "correct")]
    rewards = make_job(rewards=rewards).spec.rewards
    problems = [
        DriverProblem(reward="style", reason="timeout", message="took 9 s", count=2),
        DriverProblem(reward="correct", reason="exception", message="f.py:3: KeyError: 'a'", count=62),
    ]
    message = describe_failure(StepsWithoutSignal(3, 3), problems, rewards)
    assert message.startswith("spec.rewards[1].function: no sample of the last 3 steps has a valid score")
    assert message.index("62 x exception of reward correct: f.py:3: KeyError: 'a'") < message.index("2 x timeout")


def test_failure_without_invalid_results_names_the_weighted_sum():
    message = describe_failure(StepsWithoutSignal(3, 3), [], REWARDS)
    assert message.startswith("spec.rewards: ")
    assert "no weighted sum of scores is finite" in message


def test_failure_of_episodes_begins_with_the_field_of_what_failed():
    problems = [
        DriverProblem(reward="correct", reason="timeout", message="took 9 s", count=2),
        DriverProblem(reward="spec.agent.user", reason="exception", message="user.py:3: KeyError: 'a'", count=62),
    ]
    message = describe_failure(StepsWithoutSignal(3, 3), problems, REWARDS)
    assert message.startswith("spec.agent.user: no sample of the last 3 steps has a valid score")
    assert "62 x exception of spec.agent.user: user.py:3: KeyError: 'a'; 2 x timeout of reward correct" in message
