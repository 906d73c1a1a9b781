"""What counts in the figures of a set: scored episodes, those that the agent failed, and those without a score."""

import pytest

from rljob_api.errors import UserError
from rljob_api.manifest.evaluation import Evaluation, list_held_out
from rljob_api.manifest.job_sections import Data
from rljob_inputs.prompts import Prompt
from rljob_trainer.driver.evaluation import measure
from rljob_trainer.episodes.types import EpisodeFailure, Group, ScoredResult
from tests.support.episodes import episode


def held_out_of(**settings):
    data = Data(train={"source": "/t"}, eval={"source": "/e"})
    return list_held_out(Evaluation(**settings), data, [])[0]


def measure_groups(groups, **settings):
    found = [Group(i, Prompt(i, "p", [1]), episodes) for i, episodes in enumerate(groups)]
    return measure(found, held_out_of(**settings))


def measure_accuracy(episodes, wanted):
    """One episode of each prompt: (accuracy, failed by the agent, left out)."""
    found = measure_groups([[each] for each in episodes], accuracy=wanted)
    return found.accuracy, found.num_failed, found.num_left_out


def scored(score=1.0, **results):
    return episode(results=results, score=score)


def valid(score, **components):
    pred = components.pop("pred", None)
    return ScoredResult(id="x", valid=True, score=score, components=components, pred=pred)


def invalid(reason):
    return ScoredResult(id="x", valid=False, reason=reason)


def failed(service, reason):
    return episode(failure=EpisodeFailure(service, f"spec.agent.{service}", reason, "x"))


SOLVED, WRONG = scored(r=valid(1.0, acc=1.0)), scored(0.0, r=valid(0.0, acc=0.0))


def test_episode_that_the_agent_failed_is_not_solved_an_invalid_one_is_left_out():
    episodes = [SOLVED, SOLVED, WRONG, failed("runner", "timeout"), scored(None, r=invalid("timeout"))]
    assert measure_accuracy(episodes, None) == (2 / 4, 1, 1)


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
    assert measure_accuracy([SOLVED, failed(service, reason)], "acc") == (0.5, 1, 0)


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
    assert measure_accuracy([SOLVED, failed(service, reason)], "acc") == (1.0, 0, 1)


def test_accuracy_is_zero_if_the_agent_failed_every_episode():
    assert measure_accuracy([failed("runner", "exception")] * 2, "acc") == (0.0, 2, 0)


def test_accuracy_is_unknown_if_no_episode_was_scored():
    episodes = [failed("runner", "exception"), scored(None, r=invalid("unreachable"))]
    assert measure_accuracy(episodes, None) == (None, 1, 1)
    assert measure_accuracy([], None) == (None, 0, 0)


def test_accuracy_is_the_given_component_else_acc_else_score():
    both = [scored(0.7, r=valid(0.7, exact=0.5, acc=0.4))]
    assert measure_accuracy(both, "exact")[0] == 0.5
    assert measure_accuracy(both, None)[0] == 0.4
    assert measure_accuracy([scored(0.7, r=valid(0.7))], None)[0] == 0.7
    with pytest.raises(UserError, match=r"spec.evaluation.accuracy: .* component exat; returned: acc, exact, score"):
        measure_accuracy(both, "exat")


def test_accuracy_is_a_component_of_one_of_several_rewards_or_of_a_program():
    assert measure_accuracy([scored(3.0, a=valid(1.0, acc=1.0), b=valid(2.0, acc=0.0))], "acc")[0] == 1.0
    assert measure_accuracy([episode(own_reward=0.5, info={"solved": True}, score=0.5)], "solved")[0] == 1.0


@pytest.mark.parametrize("wanted", [None, "acc"])
def test_accuracy_is_unknown_when_its_reward_is_down(wanted):
    down = scored(None, a=invalid("unreachable"), style=valid(2.0, length=3.0))
    assert measure_accuracy([down, down], wanted) == (None, 0, 2)
    works = scored(None, a=valid(1.0, acc=0.5), style=invalid("unreachable"))
    assert measure_accuracy([works, works], "acc") == (0.5, 0, 0), "of the reward that works"


def test_samples_without_the_component_are_left_out():
    assert measure_accuracy([SOLVED, scored(1.0, r=valid(1.0))], "acc") == (1.0, 0, 1)


def test_several_answers_count_failed_ones_as_wrong_and_leave_invalid_ones_out():
    right = scored(1.0, r=valid(1.0, acc=1.0, pred="4"))
    wrong = scored(0.0, r=valid(0.0, acc=0.0, pred="5"))
    down = scored(None, r=invalid("unreachable"))
    groups = [[right, right, wrong, failed("runner", "timeout")], [wrong, wrong, right, down]]
    found = measure_groups(groups, samples_per_prompt=4)
    assert found.accuracy == (2 / 4 + 1 / 3) / 2
    assert found.pass_at == {1: (2 / 4 + 1 / 3) / 2, 2: pytest.approx((5 / 6 + 2 / 3) / 2), 4: 1.0}
    assert found.majority == 0.5, "4 wins in the first prompt; 5, which is wrong, in the second one"
    assert (found.num_failed, found.num_left_out) == (1, 1)
    assert found.accuracy_low < found.accuracy < found.accuracy_high
    assert measure_groups(groups[:1], samples_per_prompt=4, pass_at=[3, 8]).pass_at == {3: 1.0}, "8 are not sampled"


def test_nothing_is_said_of_a_set_whose_reward_is_down():
    down = scored(None, r=invalid("unreachable"))
    found = measure_groups([[down, failed("runner", "timeout")]] * 2, samples_per_prompt=2)
    assert (found.accuracy, found.pass_at, found.majority, found.num_left_out) == (None, {}, None, 2)


def test_program_names_its_answer_in_info():
    play = [
        episode(own_reward=1.0, score=1.0, info={"pred": answer, "acc": acc})
        for answer, acc in ((4, 1), (4, 1), (5, 0))
    ]
    found = measure_groups([play], samples_per_prompt=3)
    assert (found.majority, found.accuracy) == (1.0, pytest.approx(2 / 3))
