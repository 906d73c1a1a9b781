"""The log of the first reasons for which samples have no valid score."""

import json

from hypothesis import given
from hypothesis import strategies as st

from rljob_api.manifest.status import RewardProblem
from rljob_api.wire.driver_status import MAX_PROBLEM_LENGTH, MAX_PROBLEMS, DriverStatus
from rljob_trainer.driver.reports import ProblemLog, clean_message
from rljob_trainer.episodes.types import EpisodeFailure, ScoredResult
from tests.support.episodes import episode


def build_trajectory(**results):
    built = {
        name: ScoredResult(id="1", valid=True, score=1.0)
        if result is None
        else ScoredResult(id="1", valid=False, reason=result[0], message=result[1])
        for name, result in results.items()
    }
    return episode([1], [1], text="x", results=built)


def test_problem_is_new_once_and_counted_afterwards():
    log = ProblemLog()
    bad = build_trajectory(correct=("exception", "f.py:3: KeyError: 'a'"), style=None)
    [first] = log.record(4, bad)
    assert (first.reward, first.reason, first.message, first.step) == (
        "correct",
        "exception",
        "f.py:3: KeyError: 'a'",
        4,
    )
    assert log.record(5, bad) == []
    assert [(problem.count, problem.step) for problem in log.failures] == [(2, 4)]


def test_values_in_a_message_do_not_make_another_problem_but_its_line_does():
    log = ProblemLog()
    for message in ("f.py:3: KeyError: 'a'", "f.py:3: KeyError: 'b'", "f.py:4: KeyError: 'b'"):
        log.record(1, build_trajectory(r=("exception", message)))
    log.record(1, build_trajectory(r=("timeout", "took 1.5 s")))
    log.record(1, build_trajectory(r=("timeout", "took 2.5 s")))
    assert [problem.count for problem in log.failures] == [2, 1, 2]


def test_episode_that_nothing_rewarded_is_shown():
    log = ProblemLog()
    failed = build_trajectory()
    failed.failure = EpisodeFailure("runner", "spec.agent.runner", "abstained", "no reward")
    log.record(1, failed)
    assert [(problem.reward, problem.reason) for problem in log.failures] == [("spec.agent.runner", "abstained")]


def test_sandbox_that_fails_is_shown_although_the_episode_is_valid():
    log = ProblemLog()
    valid = build_trajectory(correct=None)
    valid.sandbox_failures = [EpisodeFailure("code", "spec.agent.tools[0]", "exception", "Pod is Pending")] * 2
    [problem] = log.record(2, valid)
    assert (problem.reward, problem.reason, problem.message) == ("spec.agent.tools[0]", "exception", "Pod is Pending")
    assert RewardProblem.of(problem).describe() == "spec.agent.tools[0]: a call failed (exception): Pod is Pending"


def test_abstention_does_not_count_as_failure():
    log = ProblemLog()
    log.record(1, build_trajectory(r=("abstained", "returned None")))
    assert (len(log.all), log.failures) == (1, [])


@given(st.lists(st.text(max_size=3 * MAX_PROBLEM_LENGTH), max_size=3 * MAX_PROBLEMS))
def test_any_messages_stay_within_the_bounds_of_the_status(messages):
    log = ProblemLog()
    for message in messages:
        log.record(1, build_trajectory(r=("exception", message[:2000])))
    status = DriverStatus(problems=log.failures)
    assert DriverStatus.model_validate_json(status.model_dump_json()) == status


def test_message_has_one_line_without_terminal_escapes_and_surrogates():
    cleaned = clean_message("a\n\x1b[31mb\x07\ud800 c")
    assert cleaned == "a b c"
    json.dumps(cleaned).encode()


def test_failed_episode_is_a_problem_of_its_field():
    log = ProblemLog()
    failure = EpisodeFailure("calc", "spec.agent.tools[0]", "timeout", "took 30 s")
    [problem] = log.record(2, episode(failure=failure))
    assert (problem.reward, problem.reason, problem.message) == ("spec.agent.tools[0]", "timeout", "took 30 s")
