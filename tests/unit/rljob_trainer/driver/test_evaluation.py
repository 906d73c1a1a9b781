"""What counts in the held-out accuracy: scored episodes, those that the agent failed, and those without a score."""

import pytest

from rljob_api.errors import UserError
from rljob_api.wire.protocol import ScoreResult
from rljob_trainer.driver.evaluation import Accuracy, measure_accuracy
from rljob_trainer.episodes.types import EpisodeFailure
from tests.support.episodes import episode


def scored(score=1.0, **results):
    return episode(results=results, score=score)


def valid(score, **components):
    return ScoreResult(id="x", valid=True, score=score, components=components)


def invalid(reason):
    return ScoreResult(id="x", valid=False, reason=reason)


def failed(service, reason):
    return episode(failure=EpisodeFailure(service, f"spec.agent.{service}", reason, "x"))


SOLVED, WRONG = scored(r=valid(1.0, acc=1.0)), scored(0.0, r=valid(0.0, acc=0.0))


def test_episode_that_the_agent_failed_is_not_solved_an_invalid_one_is_left_out():
    episodes = [SOLVED, SOLVED, WRONG, failed("runner", "timeout"), scored(None, r=invalid("timeout"))]
    assert measure_accuracy(episodes, None) == Accuracy(2 / 4, num_failed=1, num_left_out=1)


@pytest.mark.parametrize(
    ("service", "reason"),
    [
        ("runner", "exception"),  # also at the limit of turns: the program gets an error of its client
        ("runner", "timeout"),
        ("runner", "deadline"),
        ("runner", "worker_died"),
        ("runner", "no_turns"),
        ("agent", "deadline"),
        ("agent", "exception"),
        ("agent", "context"),
    ],
)
def test_failures_of_the_agent_count_as_zero(service, reason):
    assert measure_accuracy([SOLVED, failed(service, reason)], "acc") == Accuracy(0.5, 1, 0)


@pytest.mark.parametrize(
    ("service", "reason"),
    [
        ("runner", "unreachable"),
        ("runner", "cancelled"),
        ("runner", "abstained"),  # it returned no reward
        ("runner", "bad_return"),
        ("user", "exception"),
        ("search", "timeout"),
    ],
)
def test_failures_of_others_and_missing_rewards_are_left_out(service, reason):
    assert measure_accuracy([SOLVED, failed(service, reason)], "acc") == Accuracy(1.0, 0, 1)


def test_accuracy_is_zero_if_the_agent_failed_every_episode():
    assert measure_accuracy([failed("runner", "exception")] * 2, "acc") == Accuracy(0.0, 2, 0)


def test_accuracy_is_unknown_if_no_episode_was_scored():
    episodes = [failed("runner", "exception"), scored(None, r=invalid("unreachable"))]
    assert measure_accuracy(episodes, None) == Accuracy(None, 1, 1)
    assert measure_accuracy([], None) == Accuracy(None, 0, 0)


def test_accuracy_is_the_given_component_else_acc_else_score():
    both = [scored(0.7, r=valid(0.7, exact=0.5, acc=0.4))]
    assert measure_accuracy(both, "exact").value == 0.5
    assert measure_accuracy(both, None).value == 0.4
    assert measure_accuracy([scored(0.7, r=valid(0.7))], None).value == 0.7
    with pytest.raises(UserError, match=r"spec.evaluation.accuracy: .* component exat; returned: acc, exact, score"):
        measure_accuracy(both, "exat")


def test_accuracy_is_a_component_of_one_of_several_rewards_or_of_a_program():
    assert measure_accuracy([scored(3.0, a=valid(1.0, acc=1.0), b=valid(2.0, acc=0.0))], "acc").value == 1.0
    assert measure_accuracy([episode(own_reward=0.5, info={"solved": True}, score=0.5)], "solved").value == 1.0


@pytest.mark.parametrize("wanted", [None, "acc"])
def test_accuracy_is_unknown_when_its_reward_is_down(wanted):
    down = scored(None, a=invalid("unreachable"), style=valid(2.0, length=3.0))
    assert measure_accuracy([down, down], wanted) == Accuracy(None, 0, 2)
    works = scored(None, a=valid(1.0, acc=0.5), style=invalid("unreachable"))
    assert measure_accuracy([works, works], "acc") == Accuracy(0.5, 0, 0), "of the reward that works"


def test_samples_without_the_component_are_left_out():
    assert measure_accuracy([SOLVED, scored(1.0, r=valid(1.0))], "acc") == Accuracy(1.0, 0, 1)
